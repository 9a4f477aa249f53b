"""Which request holds which block of KV, as an SVG picture: a cell for each block, in the order of
memory.

Colour tells the request, the height of the colour how many of the block's slots hold KV, so that
waste is what stays pale. A shared block shows the colours of its requests side by side, and a dot.
Free blocks are empty, or hatched where their KV may be found again. Layers that keep alike and see
alike have blocks of their own: a grid for each such group.
"""

import colorsys
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, line, text
from headrace.stats import BlockMap, GroupMap, Holding

WIDTH = 1000
_LEFT, _TOP, _GRID_WIDTH, _LEGEND = 40, 84, 688, 758
_SPACING = 64
"""Between two grids, with two lines of words above the second."""
_MOST_NAMES = 26
_GOLDEN = 0.381966
"""Of a turn: the angle whose multiples lie furthest apart."""
_MOST_COLOURS = 4
"""Requests that a shared block shows."""
_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    f'<line x1="0" y1="0" x2="0" y2="5" stroke="{FAINT}" stroke-width="1.6"/></pattern></defs>'
)


class _Grid:
    """Where blocks are on the page, from `top` on: rows of a multiple of 8 blocks, which are
    contiguous in memory.
    """

    def __init__(self, num_blocks: int, top: float) -> None:
        self.top = top
        self.columns = max(16, 8 * math.ceil(math.sqrt(1.6 * num_blocks) / 8))
        self.pitch = min(30.0, _GRID_WIDTH / self.columns)
        self.cell = self.pitch * 0.86
        self.bottom = top + math.ceil(num_blocks / self.columns) * self.pitch

    def at(self, block: int) -> tuple[float, float]:
        return (
            _LEFT + block % self.columns * self.pitch,
            self.top + block // self.columns * self.pitch,
        )


class _Owned(NamedTuple):
    """A block in use."""

    requests: list[str]
    """Each once."""
    holders: int
    filled: int
    """Slots with KV."""


def block_map_svg(title: str, blocks: BlockMap) -> str:
    """The picture as an XML document."""
    names = list(
        dict.fromkeys(holding.request for group in blocks.groups for holding in group.holdings)
    )
    colours = {name: _colour(i) for i, name in enumerate(names)}
    body = [_HATCH, text(_LEFT, 34, title, size=18, weight="bold")]
    bottom = float(_TOP - _SPACING + (8 if len(blocks.groups) > 1 else 0))
    for group in blocks.groups:
        grid = _Grid(group.num_blocks, bottom + _SPACING)
        body += _section(group, blocks.block_size, grid, len(blocks.groups) == 1, colours)
        bottom = grid.bottom
    body += _legend(blocks, colours)
    height = max(bottom, _legend_bottom(len(names))) + 24
    return document(title, WIDTH, round(height), body)


def _section(
    group: GroupMap, block_size: int, grid: _Grid, is_only: bool, colours: dict[str, str]
) -> Iterator[str]:
    """The blocks of a group, and above them in words how they are used."""
    owned = _owners(group, block_size)
    cached = set(group.cached).difference(owned)
    free = [block for block in range(group.num_blocks) if block not in owned]
    in_use, *others = _words(group, block_size, owned, cached)
    lines = ["; ".join([in_use, *others])]
    if not is_only:  # in two lines, which leave the legend its place
        seen = f"the last {group.window:,}" if group.window else "all"
        lines = [
            f"{group.layers} layer{'s' * (group.layers > 1)} that "
            f"see{'s' * (group.layers == 1)} {seen} tokens: {in_use}",
            "; ".join(others),
        ]
    for i, words in enumerate(reversed(lines)):
        yield text(_LEFT, grid.top - (28 if is_only else 14 + 18 * i), words, fill=FAINT)
    yield (
        f'<path class="free" d="{_cells(grid, free)}" fill="#f6f8fa" stroke="#c4ccd4" '
        f'stroke-width="{min(0.8, grid.cell / 8):.2f}"/>'
    )
    if cached:
        yield f'<path class="cached" d="{_cells(grid, sorted(cached))}" fill="url(#hatch)"/>'
    for block, owner in sorted(owned.items()):
        yield from _cell(*grid.at(block), grid.cell, block_size, owner, colours)


def _owners(group: GroupMap, block_size: int) -> dict[int, _Owned]:
    owned: dict[int, _Owned] = {}
    for holding in group.holdings:
        for i, block in enumerate(holding.blocks):
            if block < 0:
                continue
            filled = min(block_size, max(0, holding.computed - i * block_size))
            before = owned.get(block, _Owned([], 0, 0))
            requests = (
                before.requests
                if holding.request in before.requests
                else [*before.requests, holding.request]
            )
            owned[block] = _Owned(requests, before.holders + 1, max(filled, before.filled))
    return owned


def _words(
    group: GroupMap, block_size: int, owned: dict[int, _Owned], cached: set[int]
) -> list[str]:
    slots, filled = len(owned) * block_size, sum(owner.filled for owner in owned.values())
    shared = sum(owner.holders > 1 for owner in owned.values())
    words = [f"{len(owned):,} of {group.num_blocks:,} blocks of {block_size} tokens in use"]
    words += (
        [
            f"{filled:,} of their {slots:,} slots hold KV "
            f"({100 * (slots - filled) / slots:.1f} % empty)"
        ]
        if slots
        else []
    )
    words += [f"{shared:,} shared"] if shared else []
    words += [f"{len(cached):,} free but cached"] if cached else []
    return words


def _cell(
    x: float, y: float, side: float, size: int, owner: _Owned, colours: dict[str, str]
) -> Iterator[str]:
    """A pale square, filled from below as far as it holds KV, a strip for each request; a dot where
    it is shared.
    """
    shown = owner.requests[:_MOST_COLOURS]
    wide, high = side / len(shown), side * owner.filled / size
    for i, name in enumerate(shown):
        rect = f'<rect x="{x + i * wide:.1f}" width="{wide:.1f}" fill="{colours[name]}"'
        if owner.filled < size:
            yield f'{rect} class="block" y="{y:.1f}" height="{side:.1f}" fill-opacity="0.22"/>'
        if high:
            yield f'{rect} class="kv" y="{y + side - high:.1f}" height="{high:.1f}"/>'
    if owner.holders > 1:
        at = f'cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="{0.2 * side:.1f}"'
        yield (
            f'<circle class="shared" {at} fill="#ffffff" stroke="{INK}" '
            f'stroke-width="{0.07 * side:.1f}"/>'
        )


def _cells(grid: _Grid, blocks: Sequence[int]) -> str:
    """Many equal cells as one path: pools have tens of thousands."""
    side = f"{grid.cell:.1f}"
    return "".join(f"M{x:.1f} {y:.1f}h{side}v{side}h-{side}z" for x, y in map(grid.at, blocks))


def _colour(i: int) -> str:
    """The palette first; later ones by the golden angle, so that neighbours in age differ."""
    named = COLOURS[:-1]
    if i < len(named):
        return named[i]
    rgb = colorsys.hls_to_rgb(i * _GOLDEN % 1, 0.42 + 0.09 * (i % 3), 0.55 + 0.2 * (i % 2))
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


def _legend(blocks: BlockMap, colours: dict[str, str]) -> Iterator[str]:
    yield text(_LEGEND, _TOP + 10, "Request", weight="bold")
    yield text(WIDTH - 90, _TOP + 10, "tokens", anchor="end", fill=FAINT)
    yield text(WIDTH - 30, _TOP + 10, "blocks", anchor="end", fill=FAINT)
    y = _TOP + 10.0
    for name, colour in list(colours.items())[:_MOST_NAMES]:
        y += 21
        own = [
            [holding for holding in group.holdings if holding.request == name]
            for group in blocks.groups
        ]
        held = sum(
            len({block for holding in holdings for block in holding.blocks if block >= 0})
            for holdings in own
        )
        yield f'<rect x="{_LEGEND}" y="{y - 10}" width="14" height="12" rx="2" fill="{colour}"/>'
        yield text(_LEGEND + 24, y, _label(name, own[0]))
        yield text(WIDTH - 90, y, f"{max(holding.computed for holding in own[0]):,}", anchor="end")
        yield text(WIDTH - 30, y, f"{held:,}", anchor="end")
    if len(colours) > _MOST_NAMES:
        y += 21
        yield text(_LEGEND + 24, y, f"and {len(colours) - _MOST_NAMES:,} more", fill=FAINT)
    yield line([(_LEGEND, y + 16), (WIDTH - 30, y + 16)], GRID, 1)
    y += 26
    samples = {
        "partly filled: pale is waste": _Owned(["?"], 1, 5),
        "shared": _Owned(["?"], 2, 8),
        "shared by two requests": _Owned(["?", "!"], 2, 8),
    }
    inks = {"?": COLOURS[0], "!": COLOURS[1]}
    for what, sample in samples.items():
        yield from _cell(_LEGEND, y, 14, 8, sample, inks)
        yield text(_LEGEND + 24, y + 11, what)
        y += 21
    for what, fill in (("free", "#f6f8fa"), ("free, KV still there", "url(#hatch)")):
        yield (
            f'<rect x="{_LEGEND}" y="{y:.1f}" width="14" height="14" fill="{fill}" '
            'stroke="#c4ccd4" stroke-width="0.8"/>'
        )
        yield text(_LEGEND + 24, y + 11, what)
        y += 21


def _legend_bottom(names: int) -> float:
    return _TOP + 10 + 21 * (min(names, _MOST_NAMES) + (names > _MOST_NAMES)) + 26 + 5 * 21


def _label(name: str, own: Sequence[Holding]) -> str:
    short = name if len(name) <= 16 else f"{name[:15]}…"
    return f"{short} x {len(own)}" if len(own) > 1 else short
