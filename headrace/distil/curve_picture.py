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
    ticks, last = _ticks(values), max([1, *steps])
    low, high = ticks[0], ticks[-1]

    def place(step: int, value: float) -> tuple[float, float]:
        x = left + _PANEL * step / last
        return x, _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)

    for value in ticks:
        y = place(0, value)[1]
        yield line([(left, y), (left + _PANEL, y)], GRID, 1)
        yield text(left - 8, y + 4, f"{value:.4g}", anchor="end")
    for step in _ticks([0, last]):
        if step <= last:
            yield text(place(int(step), low)[0], _BOTTOM + 18, f"{step:,.0f}", anchor="middle")
    yield line([(left, _TOP), (left, _BOTTOM), (left + _PANEL, _BOTTOM)], INK, 1)
    yield text(left + _PANEL / 2, _BOTTOM + 42, "steps", anchor="middle", size=13)
    yield text(left, _TOP - 10, label, weight="bold")

    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        yield line([place(*point) for point in points], colour, 2)
        if name and points:
            x, y = place(*points[-1])
            yield from haloed(x - 4, y - 6, f"{name} {points[-1][1]:.2f}", colour, anchor="end")


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers from below the least value to above the greatest, at even distances."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    assert math.isfinite(high - low)
    rough = (high - low) / _TICKS or 0.25
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [i * distance for i in range(first, max(last, first + 1) + 1)]
