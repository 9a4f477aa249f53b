"""SVG picture of a training: its loss, and figures over held-out texts, by step."""

import math
from collections.abc import Iterator, Mapping, Sequence

from headrace.distil.curve import Curve
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text

_WIDTH, _HEIGHT, _PANEL = 1000, 420, 380
_TOP, _BOTTOM = 84, 350
_TICKS = 4

Series = Sequence[tuple[int, float]]
"""Points (step, value)."""


def curve_svg(title: str, subtitle: str, curve: Curve, shown: Mapping[str, str]) -> str:
    """Draw an SVG document: the loss at the left, held-out figures at the right.

    `shown` gives the labels of the figures that are drawn, by name.
    """
    loss = [(point.step, point.loss) for point in curve.points if point.loss is not None]
    figures = {
        label: [(point.step, point.held_out[name]) for point in curve.evaluated]
        for name, label in shown.items()
    }
    body = [
        text(76, 34, title, size=18, weight="bold"),
        text(76, 56, subtitle, fill=FAINT),
        *_panel(76, "loss of training, nats", {"": loss}),
        *_panel(76 + _WIDTH / 2, "held-out texts", figures),
    ]
    return document(title, _WIDTH, _HEIGHT, body)


def _panel(left: float, label: str, series: Mapping[str, Series]) -> Iterator[str]:
    """The axes of a panel, with a line for each series."""
    values = [value for points in series.values() for _, value in points]
    steps = [step for points in series.values() for step, _ in points]
    low, high = _range(values)
    last = max([1, *steps])

    def place(step: int, value: float) -> tuple[float, float]:
        x = left + _PANEL * step / last
        return x, _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)

    for i in range(_TICKS + 1):
        value = low + (high - low) * i / _TICKS
        y = place(0, value)[1]
        yield line([(left, y), (left + _PANEL, y)], GRID, 1)
        yield text(left - 8, y + 4, f"{value:.3g}", anchor="end")
        x = left + _PANEL * i / _TICKS
        yield text(x, _BOTTOM + 18, f"{round(last * i / _TICKS):,}", anchor="middle")
    yield line([(left, _TOP), (left, _BOTTOM), (left + _PANEL, _BOTTOM)], INK, 1)
    yield text(left + _PANEL / 2, _BOTTOM + 42, "steps", anchor="middle", size=13)
    yield text(left, _TOP - 10, label, weight="bold")

    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        yield line([place(*point) for point in points], colour, 2)
        if name and points:
            x, y = place(*points[-1])
            yield from haloed(x - 4, y - 6, f"{name} {points[-1][1]:.2f}", colour, anchor="end")


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, with a margin."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    assert math.isfinite(margin)
    return low - margin, high + margin
