"""SVG picture of a climb: a staircase of speeds below the limit of the machine."""

import math
from collections.abc import Iterator

from headrace.measure.climb_results import Climb, Step
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text

WIDTH, HEIGHT = 1000, 590
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 976, 92, 452
_TURN = -38.0
_UP, _DOWN = COLOURS[0], COLOURS[1]


def climb_svg(climb: Climb) -> str:
    """Draw an SVG document. A rung that is slower than its base has another colour."""
    axis = _Axis([step.tokens_per_second for step in climb.steps], climb.limit)
    width = (_RIGHT - _LEFT) / len(climb.steps)
    title = f"{climb.name}: from naive inference to all techniques"
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, _subtitle(climb), fill=FAINT),
        text(_LEFT, 74, _total(climb), fill=FAINT),
        *_frame(axis),
        *(
            part
            for i, step in enumerate(climb.steps)
            for part in _column(climb, step, axis, _LEFT + i * width, width)
        ),
        *_ceiling(climb, axis),
        *_left_out(climb),
    ]
    return document(title, WIDTH, HEIGHT, body)


class _Axis:
    """Tokens/s on a logarithmic scale."""

    def __init__(self, speeds: list[float], limit: float) -> None:
        self.low = math.log10(min(speeds)) - 0.5
        self.high = math.log10(max(*speeds, limit)) + 0.25

    def y(self, speed: float) -> float:
        share = (math.log10(speed) - self.low) / (self.high - self.low)
        return _BOTTOM - (_BOTTOM - _TOP) * share


def _subtitle(climb: Climb) -> str:
    machine = climb.machine
    return (
        f"{climb.requests} requests, {climb.output_tokens:,} output tokens; {machine.cpu}, "
        f"{machine.at_work}, {machine.isa}"
    )


def _total(climb: Climb) -> str:
    best = max(climb.steps, key=lambda step: step.tokens_per_second)
    factor = factor_text(climb.factor(best, climb.steps[0].rung.name) or 1.0).removeprefix("x ")
    return f"Fastest: {best.rung.name}, {factor} times the first. ~: scaled from a part of the work"


def _frame(axis: _Axis) -> Iterator[str]:
    for power in range(math.ceil(axis.low), math.floor(axis.high) + 1):
        y = axis.y(10.0**power)
        yield line([(_LEFT, y), (_RIGHT, y)], GRID, 1)
        yield text(_LEFT - 8, y + 4, f"{10.0**power:,g}", anchor="end")
    yield line([(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], INK, 1)
    middle = (_TOP + _BOTTOM) / 2
    yield text(_LEFT - 8, _BOTTOM - 8, "of base", anchor="end", size=11, fill=FAINT)
    yield text(22, middle, "output tokens/s", anchor="middle", size=13, turn=-90)


def _column(climb: Climb, step: Step, axis: _Axis, x: float, width: float) -> Iterator[str]:
    y, middle = axis.y(step.tokens_per_second), x + width / 2
    factor = climb.factor(step, step.rung.base)
    colour = _DOWN if factor is not None and factor < 1 else _UP
    yield (
        f'<rect class="rung" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{_BOTTOM - y:.1f}" fill="{colour}" fill-opacity="0.16"/>'
    )
    yield line([(x, y), (x + width, y)], colour, 3)
    yield text(middle, y - 6, speed_text(step), anchor="middle", weight="bold")
    if factor is not None:
        yield text(middle, _BOTTOM - 8, factor_text(factor), anchor="middle", size=11, fill=colour)
    yield text(middle + 4, _BOTTOM + 18, step.rung.name, anchor="end", turn=_TURN)


def _ceiling(climb: Climb, axis: _Axis) -> Iterator[str]:
    y = axis.y(climb.limit)
    yield line([(_LEFT, y), (_RIGHT, y)], COLOURS[2], 2)
    label = f"limit of this machine, without drafts: {climb.limit:,.0f} tokens/s"
    yield from haloed(_LEFT + 8, y - 6, label, COLOURS[2], weight="bold")


def _left_out(climb: Climb) -> Iterator[str]:
    if climb.left_out:
        note = f"Left out: {', '.join(climb.left_out)}"
        yield text(_LEFT, HEIGHT - 14, note, fill=FAINT, size=11)


def speed_text(step: Step) -> str:
    """Tokens/s with three digits, and `~` if they are scaled."""
    speed, mark = step.tokens_per_second, "~" if step.share < 1 else ""
    return mark + (f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}")


def factor_text(factor: float) -> str:
    digits = 2 if factor < 10 else 1 if factor < 100 else 0
    return f"x {factor:,.{digits}f}"
