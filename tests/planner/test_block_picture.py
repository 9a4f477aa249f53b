"""The block map: every block drawn once, in the right colour, as full as it is."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from headrace.planner.block_picture import block_map_svg
from headrace.stats import BlockMap, GroupMap, Holding

SVG = "{http://www.w3.org/2000/svg}"


def one_group(
    num_blocks: int, block_size: int, holdings: list[Holding], cached: tuple[int, ...] = ()
) -> BlockMap:
    return BlockMap(block_size, [GroupMap(2, 0, num_blocks, holdings, cached)])


BLOCKS = one_group(
    40,
    8,
    [
        Holding("a", 0, 20, [0, 1, 2]),
        Holding("a", 1, 20, [0, 1, 3]),
        Holding("b", 0, 9, [0, 9]),
        Holding("c", 0, 0, [7]),
    ],
    cached=(20, 21, 9),
)


def rects(svg: str, kind: str) -> list[dict[str, str]]:
    return [
        rect.attrib
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if rect.get("class") == kind
    ]


def cells(svg: str, kind: str) -> int:
    paths = [
        path.attrib["d"]
        for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if path.get("class") == kind
    ]
    return sum(path.count("M") for path in paths)


def legend(svg: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Numbers of filled and pale strips in the legend."""
    empty = block_map_svg("t", one_group(40, 8, []))
    return rects(empty, "kv"), rects(empty, "block")


def test_block_picture_has_every_block() -> None:
    svg = block_map_svg("a title", BLOCKS)
    strips, pale = legend(svg)
    assert (
        cells(svg, "free") == 40 - 6 and cells(svg, "cached") == 2
    )  # a cached block is held again
    assert (
        len(rects(svg, "kv")) - len(strips) == 2 + 1 + 1 + 1 + 1
    )  # block 0 has two strips; block 7 is still empty
    assert len(rects(svg, "block")) - len(pale) == 4
    assert (
        "6 of 40 blocks of 8 tokens in use; 25 of their 48 slots hold KV (47.9 % empty); "
        "2 shared; 2 free but cached" in svg
    )


def test_block_picture_has_a_grid_for_each_group() -> None:
    windowed = GroupMap(
        10, 12, 16, [Holding("a", 0, 20, [-1, 5, 6]), Holding("b", 0, 9, [0, 9])], [3]
    )
    svg = block_map_svg("t", BlockMap(8, [*BLOCKS.groups, windowed]))
    strips, _ = legend(svg)
    assert cells(svg, "free") == 40 - 6 + 16 - 4 and cells(svg, "cached") == 2 + 1
    assert len(rects(svg, "kv")) - len(strips) == 6 + 4
    assert "2 layers that see all tokens: 6 of 40 blocks" in svg
    assert "10 layers that see the last 12 tokens: 4 of 16 blocks of 8 tokens in use<" in svg
    assert "21 of their 32 slots hold KV (34.4 % empty); 1 free but cached<" in svg
    tops = sorted({float(rect["y"]) for rect in rects(svg, "kv") if float(rect["x"]) < 700})
    assert max(b - a for a, b in pairwise(tops)) > 40  # there are words between the grids
    assert [int(text) for text in re.findall(r'x="970.0".*?>(\d+)<', svg)] == [
        4 + 2,
        2 + 2,
        1,
    ]  # blocks of a, b and c


def test_height_is_the_share_of_filled_slots() -> None:
    svg = block_map_svg("t", one_group(1, 8, [Holding("a", 0, 2, [0])]))
    (full,), (whole,) = (
        [r for r in rects(svg, kind) if float(r["x"]) < 500] for kind in ("kv", "block")
    )
    assert float(full["height"]) / float(whole["height"]) == pytest.approx(0.25, abs=0.01)
    assert float(full["y"]) + float(full["height"]) == pytest.approx(
        float(whole["y"]) + float(whole["height"]), abs=0.15
    )


def test_each_request_has_its_own_colour() -> None:
    blocks = one_group(64, 4, [Holding(str(i), 0, 4, [i]) for i in range(40)])
    svg = block_map_svg("t", blocks)
    assert len({rect["fill"] for rect in rects(svg, "kv") if float(rect["x"]) < 740}) == 40
    assert "and 14 more" in svg


def test_block_picture_of_many_blocks() -> None:
    svg = block_map_svg("t", one_group(2**16, 32, [Holding("long", 0, 2**15, list(range(1024)))]))
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    assert width == 1000 and height < 700 and len(svg) < 3_000_000
    for rect in rects(svg, "kv"):
        assert 0 <= float(rect["x"]) <= width and 0 <= float(rect["y"]) <= height


def test_hostile_name_stays_text() -> None:
    svg = block_map_svg("<t>", one_group(4, 4, [Holding("<script>\x1b" + "x" * 99, 0, 3, [1])]))
    ElementTree.fromstring(svg)
    assert "<script>" not in svg and "\x1b" not in svg and "x" * 20 not in svg
