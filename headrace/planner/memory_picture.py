"""SVG bar of the parts of a device's memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.planner.svg import COLOURS, FAINT, INK, document, line, text

WIDTH, HEIGHT = 1000, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 960, 84, 122
_FREE = "#f6f8fa"


class MemoryPart(NamedTuple):
    name: str
    bytes: int
    is_free: bool = False


def with_free(parts: Sequence[MemoryPart], memory: int) -> list[MemoryPart]:
    """The parts, and the free rest of the memory."""
    free = memory - sum(part.bytes for part in parts)
    return [*parts, *([MemoryPart("free", free, is_free=True)] if free > 0 else [])]


def memory_svg(title: str, subtitle: str, parts: Sequence[MemoryPart], memory: int) -> str:
    """Draw an SVG document. Parts that need more than `memory` bytes pass a mark."""
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, subtitle, fill=FAINT),
        *_bar(with_free(parts, memory), memory),
    ]
    return document(title, WIDTH, HEIGHT, body)


def _bar(parts: Sequence[MemoryPart], memory: int) -> Iterator[str]:
    total = max(memory, sum(part.bytes for part in parts))
    scale = (_RIGHT - _LEFT) / total
    column = (_RIGHT - _LEFT) / max(4, len(parts))
    start = 0
    for i, part in enumerate(parts):
        fill = _FREE if part.is_free else COLOURS[i % len(COLOURS)]
        x, width = _LEFT + scale * start, scale * part.bytes
        yield (
            f'<rect class="part" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{_BOTTOM - _TOP}" fill="{fill}" stroke="#c4ccd4" stroke-width="0.6"/>'
        )
        start += part.bytes

        left = _LEFT + i * column
        yield (
            f'<rect x="{left:.1f}" y="{_BOTTOM + 24}" width="12" height="12" rx="2" '
            f'fill="{fill}" stroke="#c4ccd4" stroke-width="0.6"/>'
        )
        yield text(left + 20, _BOTTOM + 34, part.name)
        share = f"{part.bytes / 1e9:,.2f} GB, {part.bytes / memory:.1%}"
        yield text(left + 20, _BOTTOM + 52, share, fill=FAINT)
    if total > memory:
        x = _LEFT + scale * memory
        yield line([(x, _TOP - 8), (x, _BOTTOM + 8)], INK, 2)
        yield text(x - 6, _TOP - 10, "memory", anchor="end")
