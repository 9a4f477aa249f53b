"""Layout of the pictures: text neither overlaps nor leaves the page, and cells and points have
their places and sizes.
"""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from headrace.measure.climb_picture import climb_svg
from headrace.measure.op_profile import OpProfile, PhaseProfile, decode_phase, prefill_phase
from headrace.measure.roofline_picture import roofline_svg
from headrace.planner.block_picture import block_map_svg
from headrace.planner.hardware import Machine
from headrace.planner.svg import COLOURS, FAINT, GRID, INK
from headrace.stats import BlockMap, GroupMap, Holding
from tests.measure.climbs import a_climb, a_step

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine("Zen 4", "avx512", 2, 40e9, {"int8": 800e9, "bf16": 400e9, "f32": 200e9})
Box = tuple[float, float, float, float]


def words(root: ElementTree.Element) -> list[tuple[Box, str, ElementTree.Element]]:
    """Approximate boxes of all texts: a letter is half as wide as high. White outlines do not
    count.
    """
    found = []
    for text in root.iter(f"{SVG}text"):
        x, y, size = (
            float(text.attrib["x"]),
            float(text.attrib["y"]),
            float(text.get("font-size", "12")),
        )
        if text.text and text.get("stroke") is None and text.get("transform") is None:
            width = 0.5 * size * len(text.text)
            left = (
                x
                - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
                * width
            )
            found.append(((left, y - 0.75 * size, left + width, y), text.text, text))
    return found


def overlap(a: Box, b: Box) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])


def check_words(root: ElementTree.Element, obstacles: list[Box] = []) -> None:  # noqa: B006
    """Check that texts are on the page, with a margin, over no other text and no shape.

    The title must be large and bold.
    """
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width:.0f} {height:.0f}"
    found = words(root)
    for box, text, _ in found:
        assert box[0] >= 8 and box[1] >= 8 and box[2] <= width - 8 and box[3] <= height - 8, text
        assert not any(overlap(box, other) for other in obstacles), text
    for (a, one, _), (b, other, _) in itertools.combinations(found, 2):
        assert not overlap(a, b), (one, other)
    _, title, element = found[0]
    assert title == root.findtext(f"{SVG}title") and (
        element.get("font-size"),
        element.get("font-weight"),
    ) == ("18", "bold")
    for _, _, element in found:
        assert element.get("fill", "#1f2933") in ("#1f2933", "#5f6c7b", *COLOURS)
        assert element.get("font-weight") in (None, "bold")


def rect(element: ElementTree.Element) -> Box:
    x, y = float(element.attrib["x"]), float(element.attrib["y"])
    return x, y, x + float(element.attrib["width"]), y + float(element.attrib["height"])


def free_cells(root: ElementTree.Element, kind: str = "free") -> list[list[Box]]:
    """Of each grid."""
    grids = []
    for path in root.iter(f"{SVG}path"):
        if path.get("class") == kind:
            cells = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z", path.attrib["d"])
            assert "".join("M{} {}h{}v{}h-{}z".format(*cell) for cell in cells) == path.attrib["d"]
            assert all(wide == high == back for _, _, wide, high, back in cells)
            grids.append(
                [
                    (float(x), float(y), float(x) + float(side), float(y) + float(side))
                    for x, y, side, _, _ in cells
                ]
            )
    return grids


def picture(*groups: GroupMap) -> ElementTree.Element:
    return ElementTree.fromstring(block_map_svg("What holds what", BlockMap(8, list(groups))))


@pytest.mark.parametrize("num_blocks", [1, 16, 40, 333, 5000])
def test_blocks_are_drawn_in_the_order_of_memory(num_blocks: int) -> None:
    """Rows of some eights of blocks, side by side and apart, left of the legend and below the
    words.
    """
    root = picture(GroupMap(2, 0, num_blocks, [], []))
    (cells,) = free_cells(root)
    assert len(cells) == num_blocks
    check_words(root, cells)
    assert not any("cached" in text or "shared;" in text for _, text, _ in words(root))
    rows = [list(row) for _, row in itertools.groupby(cells, key=lambda cell: cell[1])]
    columns = len(rows[0]) if len(rows) > 1 else max(16, num_blocks)
    assert columns % 8 == 0 and all(len(row) == columns for row in rows[:-1])
    side, pitch = cells[0][2] - cells[0][0], min(30, 688 / columns)
    assert 0.8 * pitch < side < 0.9 * pitch
    left, top = cells[0][:2]
    for i, cell in enumerate(cells):
        assert cell[0] - left == pytest.approx(i % columns * pitch, abs=0.11)
        assert cell[1] - top == pytest.approx(i // columns * pitch, abs=0.11)
    assert (
        left == 40
        and max(cell[2] for cell in cells) < 740
        and cells[-1][3] < float(root.attrib["height"]) - 16
    )
    assert num_blocks < 100 or 0.5 < len(rows) / columns < 1  # a page is broader than high


HOLDINGS = [
    Holding("first", 0, 20, [0, 1, 2]),
    Holding("first", 1, 20, [0, 1, 3]),
    Holding("second", 0, 9, [0, 9]),
    Holding("third", 0, 3, [7]),
]


@pytest.mark.parametrize("windows", [(0,), (0, 12), (0, 12, 100)])
def test_a_block_is_where_it_would_be_if_it_were_free(windows: tuple[int, ...]) -> None:
    empty = picture(*(GroupMap(2, window, 40, [], []) for window in windows))
    root = picture(*(GroupMap(1, window, 40, HOLDINGS, [20, 9]) for window in windows))
    places = free_cells(empty)
    for grid, free, cached in zip(
        places, free_cells(root), free_cells(root, "cached"), strict=True
    ):
        assert free == [
            cell for i, cell in enumerate(grid) if i not in (0, 1, 2, 3, 7, 9)
        ] and cached == [grid[20]]
    check_words(root, [cell for grid in places for cell in grid])
    layers = [text for _, text, _ in words(root) if text.startswith("1 layer that sees ")]
    assert len(layers) == (len(windows) if len(windows) > 1 else 0)
    full = [
        element
        for element in root.iter(f"{SVG}rect")
        if element.get("class") == "kv" and float(element.attrib["x"]) < 740
    ]
    dots = [element for element in root.iter(f"{SVG}circle") if float(element.attrib["cx"]) < 740]
    assert len(full) == len(windows) * 7 and len(dots) == len(windows) * 2
    for i, grid in enumerate(places):
        strips, shared = full[7 * i : 7 * i + 7], dots[2 * i : 2 * i + 2]
        colours = {"first": COLOURS[0], "second": COLOURS[1], "third": COLOURS[2]}
        # block, request, strip of so many, and how full: 20 tokens are two blocks and a half, of
        # the third only 3 are there
        expected = [
            (0, "first", 0, 2, 1),
            (0, "second", 1, 2, 1),
            (1, "first", 0, 1, 1),
            (2, "first", 0, 1, 0.5),
            (3, "first", 0, 1, 0.5),
        ]
        expected += [(7, "third", 0, 1, 3 / 8), (9, "second", 0, 1, 1 / 8)]
        for element, (block, request, strip, count, filled) in zip(strips, expected, strict=True):
            x0, y0, x1, y1 = grid[block]
            wide = (x1 - x0) / count
            assert rect(element) == pytest.approx(
                (x0 + strip * wide, y1 - filled * (y1 - y0), x0 + (strip + 1) * wide, y1), abs=0.16
            )
            assert element.attrib["fill"] == colours[request]
        for dot, block in zip(shared, (0, 1), strict=True):
            x0, y0, x1, y1 = grid[block]
            at = [float(dot.attrib[name]) for name in ("cx", "cy", "r")]
            assert at[:2] == pytest.approx([(x0 + x1) / 2, (y0 + y1) / 2], abs=0.11) and 0.1 * (
                x1 - x0
            ) < at[2] < 0.3 * (x1 - x0)
            assert 0 < float(dot.attrib["stroke-width"]) < at[2]


@pytest.mark.parametrize("num_requests", [1, 26, 27, 40])
def test_the_legend_has_a_row_for_each_request(num_requests: int) -> None:
    names = [f"request {i}" for i in range(num_requests)]
    root = picture(
        GroupMap(2, 0, 64, [Holding(name, 0, 7 - i % 3, [i]) for i, name in enumerate(names)], [])
    )
    check_words(root, [cell for grid in free_cells(root) for cell in grid])
    found = {text: (box, element) for box, text, element in words(root)}
    heads = [found[head][0] for head in ("Request", "tokens", "blocks")]
    assert heads[0][0] > 740 and len({head[3] for head in heads}) == 1
    fills = {rect(r)[3]: r.attrib["fill"] for r in root.iter(f"{SVG}rect") if r.get("rx")}
    held = [
        r.attrib["fill"]
        for r in root.iter(f"{SVG}rect")
        if r.get("class") == "kv" and float(r.attrib["x"]) < 740
    ]
    assert len(set(held)) == num_requests and all(
        re.fullmatch("#[0-9a-f]{6}", fill) for fill in held
    )
    assert list(fills.values()) == held[:26]
    numbers = [(box, text) for box, text, _ in words(root) if text.isdigit()]
    for i, (bottom, name) in enumerate(zip(fills, names, strict=False)):
        box = found[name][0]
        assert abs(box[3] - bottom) < 4 and box[0] > heads[0][0] + 14  # beside its colour
        row = [(other[2], text) for other, text in numbers if other[3] == box[3]]
        assert row == [(heads[1][2], str(7 - i % 3)), (heads[2][2], "1")]
    assert (f"and {num_requests - 26} more" in found) == (num_requests > 26)


def profile(name: str, seconds: float, *ops: tuple[str, float, float]) -> PhaseProfile:
    """A phase of ops with these seconds and operations per byte, each of a million bytes."""
    made = [
        OpProfile(
            name=op,
            calls=1,
            seconds=op_seconds,
            bytes=10**6,
            flops=int(intensity * 10**6),
            kind="int8",
            memory_seconds=10**6 / 40e9,
            arithmetic_seconds=intensity * 10**6 / 800e9,
            floor=2.5e-5,
        )
        for op, op_seconds, intensity in ops
    ]
    phase = prefill_phase(512, 2) if name == "prefill" else decode_phase(int(name), 1, 2)
    return PhaseProfile(
        phase=phase,
        ops=tuple(made),
        walls=(seconds,),
        outside=seconds - sum(op.seconds for op in made),
        barriers=1,
    )


def points(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "point"]


def test_the_words_of_a_roofline_are_apart() -> None:
    ops = ("linear", "attention", "linear_add", "glu_linear", "qkv_rope_write")
    profiles = [
        profile(str(depth), 1e-3, *((op, 2e-4 / (1 + i), 2.0 * 4**i) for i, op in enumerate(ops)))
        for depth in (8, 600, 4000)
    ]
    profiles.append(
        profile("prefill", 1e-3, *((op, 1e-4, 100.0 * 2**i) for i, op in enumerate(ops)))
    )
    root = ElementTree.fromstring(roofline_svg("Where time goes", MACHINE, profiles))
    check_words(root)
    named = {
        text: element.get("fill")
        for _, text, element in words(root)
        if element.get("font-weight") == "bold"
    }
    assert set(ops) < set(named) and len({named[op] for op in ops}) == 5
    for point in points(root):
        assert point.get("fill") == named[point.findtext(f"{SVG}title", "").partition(",")[0]]
    legend = {rect(r)[3]: r.attrib["fill"] for r in root.iter(f"{SVG}rect") if r.get("rx")}
    rows = {box[3]: text for box, text, _ in words(root) if text in ops and box[0] > 748}
    assert {rows[bottom]: fill for bottom, fill in legend.items()} == {op: named[op] for op in ops}


def test_the_area_of_a_point_is_its_share_of_the_time() -> None:
    shares = (0.5, 0.32, 0.125, 0.02)
    root = ElementTree.fromstring(
        roofline_svg("t", MACHINE, [profile("8", 1.0, *((f"op{s}", s, 10.0) for s in shares))])
    )
    radii = [
        float(circle.attrib["r"]) for point in points(root) for circle in point.iter(f"{SVG}circle")
    ]
    assert radii == pytest.approx(
        [13 * math.sqrt(share) for share in shares[:3]] + [3.5], abs=0.06
    )  # no smaller ones


def test_a_tick_is_where_its_number_says() -> None:
    """One op on the slope: at 10 operations a byte memory allows 400 G operations a second."""
    root = ElementTree.fromstring(
        roofline_svg("t", MACHINE, [profile("8", 2.5e-5, ("op", 2.5e-5, 10.0))])
    )
    (circle,) = (circle for point in points(root) for circle in point.iter(f"{SVG}circle"))
    ticks = {"x": dict[float, float](), "y": dict[float, float]()}
    for box, text, element in words(root):
        if re.fullmatch(r"[\d,.]+", text):
            axis = "x" if element.get("text-anchor") == "middle" else "y"
            ticks[axis][math.log10(float(text.replace(",", "")))] = (
                float(element.attrib["x"]) if axis == "x" else box[3] - 4
            )
    for axis, value in (("x", 10.0), ("y", 400.0)):
        (low, first), *_, (high, last) = sorted(ticks[axis].items())
        for tick, place in ticks[axis].items():
            assert place == pytest.approx(
                first + (tick - low) / (high - low) * (last - first), abs=0.3
            )
        at = first + (math.log10(value) - low) / (high - low) * (last - first)
        assert float(circle.attrib["c" + axis]) == pytest.approx(at, abs=0.5)
    lines = [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    for place in ticks["x"].values():
        assert any(line[0][0] == line[-1][0] == place for line in lines)
    for place in ticks["y"].values():
        assert any(line[0][1] == line[-1][1] == pytest.approx(place) for line in lines)


@pytest.mark.parametrize("colour", [INK, FAINT, GRID, "#ffffff", "#f6f8fa"])
def test_a_dark_scheme_replaces_ink_and_paper(colour: str) -> None:
    """The replacement is on the other side of grey, in fills and in strokes."""
    style = picture(GroupMap(2, 0, 8, [], [])).findtext(f"{SVG}style", "")
    assert style.startswith("@media (prefers-color-scheme:dark)")
    rules = re.findall(rf'\[(fill|stroke)="{colour}"\]{{(\w+):(#\w+)}}', style)
    assert [(part, part) for part in ("fill", "stroke")] == [rule[:2] for rule in rules]

    def brightness(name: str) -> int:
        return sum(int(name[i : i + 2], 16) for i in (1, 3, 5))

    for _, _, dark in rules:
        assert (brightness(dark) > 382) != (brightness(colour) > 382)


def test_a_staircase_has_a_column_for_each_rung() -> None:
    """Heights are on a scale of logarithms, and a rung that is slower than its base has another
    colour.
    """
    names = [f"rung with the number {i}" for i in range(15)]
    speeds = [0.05 * 3**i for i in range(14)] + [9_000.0]
    steps = [
        a_step(name, speed, names[i - 1] if i else "")
        for i, (name, speed) in enumerate(zip(names, speeds, strict=True))
    ]
    found = a_climb(*steps, limit=250_000.0, left_out={"W8A8": "no room"})
    root = ElementTree.fromstring(climb_svg(found))
    check_words(root)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {*names, "0.05", "9,000", "x 3.00", "Left out: W8A8"} <= texts
    columns = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "rung"]
    heights = [float(column.attrib["height"]) for column in columns]
    assert len(columns) == 15
    assert [b - a for a, b in itertools.pairwise(heights[:14])] == pytest.approx(
        [heights[1] - heights[0]] * 13, abs=0.11
    )
    assert {column.attrib["fill"] for column in columns[:14]} == {COLOURS[0]}
    assert columns[14].attrib["fill"] == COLOURS[1]
