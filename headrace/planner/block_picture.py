"""SVG picture of the KV blocks and of their requests, in the order of memory.

Colour is the request, and its height the share of filled slots. Hatched blocks are cached.
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
_MAX_NAMES = 26
_GOLDEN = 0.381966
_MAX_COLOURS = 4
_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    f'<line x1="0" y1="0" x2="0" y2="5" stroke="{FAINT}" stroke-width="1.6"/></pattern></defs>'
)


class _Grid:
    def __init__(self, num_blocks: int, top: float) -> None:
        self.top = top
        self.columns = max(16, 8 * math.ceil(math.sqrt(1.6 * num_blocks) / 8))
        self.pitch = min(30.0, _GRID_WIDTH / self.columns)
        self.cell = self.pitch * 0.86
        self.bottom = top + math.ceil(num_blocks / self.columns) * self.pitch

    def corner(self, block: int) -> tuple[float, float]:
        row, column = divmod(block, self.columns)
        return _LEFT + column * self.pitch, self.top + row * self.pitch


class _UsedBlock(NamedTuple):
    requests: list[str]
    holders: int
    filled: int


def block_map_svg(title: str, blocks: BlockMap) -> str:
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
    used_blocks = _used_blocks(group, block_size)
    cached = set(group.cached).difference(used_blocks)
    free = [block for block in range(group.num_blocks) if block not in used_blocks]
    in_use, *details = _usage(group, block_size, used_blocks, cached)
    if is_only:
        yield text(_LEFT, grid.top - 28, "; ".join([in_use, *details]), fill=FAINT)
    else:
        # Two lines, because the legend is next to the text.
        window = f"the last {group.window:,}" if group.window else "all"
        layers = f"{group.layers} layers that see" if group.layers > 1 else "1 layer that sees"
        yield text(_LEFT, grid.top - 14, "; ".join(details), fill=FAINT)
        yield text(_LEFT, grid.top - 32, f"{layers} {window} tokens: {in_use}", fill=FAINT)
    yield (
        f'<path class="free" d="{_cells(grid, free)}" fill="#f6f8fa" stroke="#c4ccd4" '
        f'stroke-width="{min(0.8, grid.cell / 8):.2f}"/>'
    )
    if cached:
        yield f'<path class="cached" d="{_cells(grid, sorted(cached))}" fill="url(#hatch)"/>'
    for block, used in sorted(used_blocks.items()):
        yield from _cell(*grid.corner(block), grid.cell, block_size, used, colours)


def _used_blocks(group: GroupMap, block_size: int) -> dict[int, _UsedBlock]:
    used: dict[int, _UsedBlock] = {}
    for holding in group.holdings:
        for i, block in enumerate(holding.blocks):
            if block < 0:
                continue
            filled = min(block_size, max(0, holding.computed - i * block_size))
            before = used.get(block, _UsedBlock([], 0, 0))
            used[block] = _UsedBlock(
                requests=list(dict.fromkeys([*before.requests, holding.request])),
                holders=before.holders + 1,
                filled=max(filled, before.filled),
            )
    return used


def _usage(
    group: GroupMap, block_size: int, used_blocks: dict[int, _UsedBlock], cached: set[int]
) -> list[str]:
    slots = len(used_blocks) * block_size
    filled = sum(used.filled for used in used_blocks.values())
    shared = sum(used.holders > 1 for used in used_blocks.values())
    phrases = [f"{len(used_blocks):,} of {group.num_blocks:,} blocks of {block_size} tokens in use"]
    if slots:
        empty = 100 * (slots - filled) / slots
        phrases.append(f"{filled:,} of their {slots:,} slots hold KV ({empty:.1f} % empty)")
    if shared:
        phrases.append(f"{shared:,} shared")
    if cached:
        phrases.append(f"{len(cached):,} free but cached")
    return phrases


def _cell(
    x: float, y: float, side: float, block_size: int, used: _UsedBlock, colours: dict[str, str]
) -> Iterator[str]:
    shown = used.requests[:_MAX_COLOURS]
    width, height = side / len(shown), side * used.filled / block_size
    for i, name in enumerate(shown):
        rect = f'<rect x="{x + i * width:.1f}" width="{width:.1f}" fill="{colours[name]}"'
        if used.filled < block_size:
            yield f'{rect} class="block" y="{y:.1f}" height="{side:.1f}" fill-opacity="0.22"/>'
        if height:
            yield f'{rect} class="kv" y="{y + side - height:.1f}" height="{height:.1f}"/>'
    if used.holders > 1:
        dot = f'cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="{0.2 * side:.1f}"'
        yield (
            f'<circle class="shared" {dot} fill="#ffffff" stroke="{INK}" '
            f'stroke-width="{0.07 * side:.1f}"/>'
        )


def _cells(grid: _Grid, blocks: Sequence[int]) -> str:
    """Many equal cells as one path, because pools have tens of thousands of blocks."""
    side = f"{grid.cell:.1f}"
    return "".join(f"M{x:.1f} {y:.1f}h{side}v{side}h-{side}z" for x, y in map(grid.corner, blocks))


def _colour(i: int) -> str:
    palette = COLOURS[:-1]
    if i < len(palette):
        return palette[i]
    rgb = colorsys.hls_to_rgb(i * _GOLDEN % 1, 0.42 + 0.09 * (i % 3), 0.55 + 0.2 * (i % 2))
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


def _legend(blocks: BlockMap, colours: dict[str, str]) -> Iterator[str]:
    yield text(_LEGEND, _TOP + 10, "Request", weight="bold")
    yield text(WIDTH - 90, _TOP + 10, "tokens", anchor="end", fill=FAINT)
    yield text(WIDTH - 30, _TOP + 10, "blocks", anchor="end", fill=FAINT)
    y = _TOP + 10.0
    for name, colour in list(colours.items())[:_MAX_NAMES]:
        y += 21
        holdings_by_group = [
            [holding for holding in group.holdings if holding.request == name]
            for group in blocks.groups
        ]
        num_blocks = sum(
            len({block for holding in holdings for block in holding.blocks if block >= 0})
            for holdings in holdings_by_group
        )
        first = holdings_by_group[0]
        num_tokens = max(holding.computed for holding in first)
        yield f'<rect x="{_LEGEND}" y="{y - 10}" width="14" height="12" rx="2" fill="{colour}"/>'
        yield text(_LEGEND + 24, y, _label(name, first))
        yield text(WIDTH - 90, y, f"{num_tokens:,}", anchor="end")
        yield text(WIDTH - 30, y, f"{num_blocks:,}", anchor="end")
    if len(colours) > _MAX_NAMES:
        y += 21
        yield text(_LEGEND + 24, y, f"and {len(colours) - _MAX_NAMES:,} more", fill=FAINT)
    yield line([(_LEGEND, y + 16), (WIDTH - 30, y + 16)], GRID, 1)
    y += 26
    samples = {
        "partly filled: pale is waste": _UsedBlock(["?"], 1, 5),
        "shared": _UsedBlock(["?"], 2, 8),
        "shared by two requests": _UsedBlock(["?", "!"], 2, 8),
    }
    inks = {"?": COLOURS[0], "!": COLOURS[1]}
    for label, sample in samples.items():
        yield from _cell(_LEGEND, y, 14, 8, sample, inks)
        yield text(_LEGEND + 24, y + 11, label)
        y += 21
    for label, fill in (("free", "#f6f8fa"), ("free, KV reusable", "url(#hatch)")):
        yield (
            f'<rect x="{_LEGEND}" y="{y:.1f}" width="14" height="14" fill="{fill}" '
            'stroke="#c4ccd4" stroke-width="0.8"/>'
        )
        yield text(_LEGEND + 24, y + 11, label)
        y += 21


def _legend_bottom(names: int) -> float:
    return _TOP + 10 + 21 * (min(names, _MAX_NAMES) + (names > _MAX_NAMES)) + 26 + 5 * 21


def _label(name: str, holdings: Sequence[Holding]) -> str:
    short = name if len(name) <= 16 else f"{name[:15]}…"
    return f"{short} x {len(holdings)}" if len(holdings) > 1 else short
