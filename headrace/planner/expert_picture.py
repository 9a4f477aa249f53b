"""Rows by expert as an SVG picture: a row of cells for each layer of experts, a cell for each
expert.

Colour tells how many rows went there beside the even share, which is what each expert would have if
all had as many: pale is that, vermilion more, blue fewer, in logarithms. The scale is always the
same, so that two pictures can be compared. Experts stay in their order, since neighbours may be one
group of the routing.
"""

from collections.abc import Iterator, Sequence
from math import log2

from headrace.planner.svg import COLOURS, FAINT, GRID, document, line, text

_LEFT, _RIGHT, _TOP, _WIDTH = 76, 870, 84, 1000
_PALE, _MORE, _FEWER = "#f7f7f7", COLOURS[1], COLOURS[0]
_ENDS = {"4 or more": 2.0, "2": 1.0, "1": 0.0, "1/2": -1.0, "1/4 or fewer": -2.0}
"""Words beside the scale, and the logarithms of what they say."""
_SCALE_HEIGHT, _SCALE_STEPS = 150, 40


def expert_map_svg(title: str, loads: Sequence[Sequence[int]]) -> str:
    """The picture as an XML document; `loads` are rows, [layers of experts, experts], and some row
    went somewhere.
    """
    layers, experts = len(loads), max(map(len, loads))
    even = sum(map(sum, loads)) / (layers * experts)
    wide, high = (_RIGHT - _LEFT) / experts, min(48.0, max(12.0, 420 / layers))
    bottom = _TOP + layers * high
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, _subtitle(loads, even), fill=FAINT),
        *_cells(loads, even, wide, high),
        *_frame(layers, experts, wide, high, bottom),
        *_legend(),
    ]
    return document(title, _WIDTH, round(max(bottom + 56, _TOP + _SCALE_HEIGHT + 60)), body)


def _subtitle(loads: Sequence[Sequence[int]], even: float) -> str:
    shares = [load / even for own in loads for load in own]
    layers = f"{len(loads):,} layer" + "s" * (len(loads) > 1)
    none = f", and {shares.count(0):,} had none" if 0 in shares else ""
    return (
        f"{layers} of {max(map(len, loads)):,} experts, {even:,.1f} rows to each in the "
        f"mean; the busiest had {max(shares):.1f} times "
        f"as many, the least busy {min(shares):.2f}{none}"
    )


def _cells(loads: Sequence[Sequence[int]], even: float, wide: float, high: float) -> Iterator[str]:
    gap = min(1.0, wide / 8)
    for layer, own in enumerate(loads):
        for expert, load in enumerate(own):
            x, y, share = _LEFT + expert * wide, _TOP + layer * high, load / even
            place = f'x="{x:.1f}" y="{y:.1f}" width="{wide - gap:.1f}" height="{high - gap:.1f}"'
            words = (
                f"<title>layer {layer}, expert {expert}: {load:,} rows, {share:.2f} times the "
                "even share</title>"
            )
            yield (
                f'<rect class="expert" {place} '
                f'fill="{_colour(log2(share) if load else -2.0)}">{words}</rect>'
            )


def _colour(octaves: float) -> str:
    """The colour of so many times the even share, as a logarithm."""
    end = _MORE if octaves > 0 else _FEWER
    part = min(abs(octaves) / 2, 1.0)
    pairs = ((int(_PALE[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + part * (y - x)):02x}" for x, y in pairs)


def _frame(layers: int, experts: int, wide: float, high: float, bottom: float) -> Iterator[str]:
    yield line([(_LEFT, _TOP), (_LEFT, bottom), (_RIGHT, bottom)], GRID, 1)
    for layer in range(0, layers, _stride(high, 15)):
        yield text(_LEFT - 8, _TOP + (layer + 0.5) * high + 4, f"{layer:,}", anchor="end")
    for expert in range(0, experts, _stride(wide, 30)):
        yield text(_LEFT + (expert + 0.5) * wide, bottom + 18, f"{expert:,}", anchor="middle")
    yield text((_LEFT + _RIGHT) / 2, bottom + 42, "expert", anchor="middle", size=13)
    yield text(24, (_TOP + bottom) / 2, "layer", anchor="middle", size=13, turn=-90)


def _stride(size: float, least: float) -> int:
    """Every how many cells there is room for a number, as a power of two."""
    step = 1
    while step * size < least:
        step *= 2
    return step


def _legend() -> Iterator[str]:
    x, each = _RIGHT + 20, _SCALE_HEIGHT / _SCALE_STEPS
    yield text(x, _TOP + 8, "Times the", weight="bold")
    yield text(x, _TOP + 23, "even share", weight="bold")
    top = _TOP + 36
    for i in range(_SCALE_STEPS):
        colour = _colour(2 - 4 * (i + 0.5) / _SCALE_STEPS)
        yield (
            f'<rect x="{x}" y="{top + i * each:.1f}" width="14" height="{each + 0.5:.1f}" '
            f'fill="{colour}"/>'
        )
    for words, octaves in _ENDS.items():
        yield text(x + 22, top + _SCALE_HEIGHT * (2 - octaves) / 4 + 4, words)
