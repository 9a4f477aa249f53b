"""SVG picture of latency against throughput, with the knee and measured points."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.errors import RequestError
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text
from headrace.simulator.report import Latencies, Percentiles
from headrace.simulator.sweep import Sweep

_WIDTH, _HEIGHT = 900, 640
_LEFT, _RIGHT = 84, 860
_PANELS = ((92, 320), (372, 588))
"""Top and bottom of the panels of first tokens and of later tokens."""
_DOT = 4.5


class MeasuredPoint(NamedTuple):
    """A measurement of `headrace bench`, in seconds; None: not measured."""

    tokens_per_second: float
    first_token: float | None
    first_token_p95: float | None
    between_tokens: float | None
    between_tokens_p95: float | None


def read_measured(file: Path) -> list[MeasuredPoint]:
    """Read the throughput rows of `headrace bench --json`. Raises RequestError."""
    try:
        rows = [json.loads(row) for row in file.read_text("utf-8").splitlines() if row.strip()]
        found = [
            MeasuredPoint(
                tokens_per_second=float(row["tokens_per_second"]),
                first_token=row.get("first_token"),
                first_token_p95=row.get("first_token_p95"),
                between_tokens=row.get("between_tokens"),
                between_tokens_p95=row.get("between_tokens_p95"),
            )
            for row in rows
            if "between_tokens" in row
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        found = []
    if not found:
        raise RequestError(
            f"{file}: no measured throughput; write it by `headrace bench throughput --json`"
        )
    return found


class _Curve(NamedTuple):
    """Simulated and measured latencies of a percentile, in milliseconds."""

    name: str
    colour: str
    simulated: Sequence[tuple[float, float]]
    measured: Sequence[tuple[float, float]]


def sweep_svg(title: str, found: Sweep, measured: Sequence[MeasuredPoint] = ()) -> str:
    """Draw an SVG document."""
    speeds = [point.report.output_tokens_per_second for point in found.points]
    speeds += [point.tokens_per_second for point in measured]
    right = max(speeds) * 1.06
    first = _curves(
        found,
        lambda latencies: latencies.first_token,
        [(p.tokens_per_second, p.first_token, p.first_token_p95) for p in measured],
    )
    later = _curves(
        found,
        lambda latencies: latencies.per_token,
        [(p.tokens_per_second, p.between_tokens, p.between_tokens_p95) for p in measured],
    )
    knee = found.knee.report.output_tokens_per_second
    note = f"The knee is at {knee:,.0f} tokens/s, {found.knee.rate:,.3g} new conversations/s"
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, note, fill=FAINT),
        *_legend(bool(measured)),
        *_Panel(_PANELS[0], right, first, is_log=True).drawn("time to the first token, ms", knee),
        *_Panel(_PANELS[1], right, later, is_log=False).drawn("time per token, ms", knee),
        text((_LEFT + _RIGHT) / 2, 628, "output, tokens/s", anchor="middle", size=13),
    ]
    return document(title, _WIDTH, _HEIGHT, body)


def _curves(
    found: Sweep,
    of: Callable[[Latencies], Percentiles],
    measured: Sequence[tuple[float, float | None, float | None]],
) -> list[_Curve]:
    points = [(p.report.output_tokens_per_second, of(p.report.latencies)) for p in found.points]
    return [
        _Curve(
            "p50",
            COLOURS[0],
            [(speed, 1e3 * each.p50) for speed, each in points],
            [(speed, 1e3 * p50) for speed, p50, _ in measured if p50 is not None],
        ),
        _Curve(
            "p95",
            COLOURS[1],
            [(speed, 1e3 * each.p95) for speed, each in points],
            [(speed, 1e3 * p95) for speed, _, p95 in measured if p95 is not None],
        ),
    ]


def _legend(has_measured: bool) -> Iterator[str]:
    x = 560.0
    for name, colour in (("p50", COLOURS[0]), ("p95", COLOURS[1])):
        yield line([(x, 52), (x + 24, 52)], colour, 2)
        yield text(x + 30, 56, name)
        x += 72
    if has_measured:
        yield _ring(x + 8, 52, INK)
        yield text(x + 20, 56, "measured")


class _Panel:
    def __init__(
        self, place: tuple[int, int], right: float, curves: list[_Curve], *, is_log: bool
    ) -> None:
        self._top, self._bottom = place
        self._right, self._curves, self._is_log = right, curves, is_log
        values = [y for curve in curves for _, y in (*curve.simulated, *curve.measured) if y > 0]
        low, high = min(values, default=1.0), max(values, default=1.0)
        if is_log:
            self._low, self._high = math.log10(low) - 0.1, math.log10(high) + 0.1
        else:
            self._low, self._high = 0.0, 1.1 * high

    def drawn(self, title: str, knee: float) -> Iterator[str]:
        top, bottom = self._top, self._bottom
        for value in _steps(0, self._right):
            x = self._x(value)
            yield line([(x, top), (x, bottom)], GRID, 1)
            yield text(x, bottom + 18, f"{value:,g}", anchor="middle")
        for value in self._marks():
            y = self._y(value)
            yield line([(_LEFT, y), (_RIGHT, y)], GRID, 1)
            yield text(_LEFT - 8, y + 4, f"{value:,g}", anchor="end")
        yield line([(self._x(knee), top), (self._x(knee), bottom)], FAINT, 1.5, opacity=0.6)
        yield from haloed(self._x(knee) + 6, top + 14, "knee", FAINT)
        yield line([(_LEFT, top), (_LEFT, bottom), (_RIGHT, bottom)], INK, 1)
        yield text(22, (top + bottom) / 2, title, anchor="middle", size=13, turn=-90)

        for curve in self._curves:
            points = [(self._x(x), self._y(y)) for x, y in curve.simulated if y > 0]
            yield line(points, curve.colour, 2)
            for x, y in points:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{curve.colour}"/>'
            for x, y in curve.measured:
                yield _ring(self._x(x), self._y(max(y, 1e-9)), curve.colour)

    def _marks(self) -> list[float]:
        if not self._is_log:
            return _steps(0, self._high)
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        return [value for value in values if self._low <= math.log10(value) <= self._high]

    def _x(self, value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * value / self._right

    def _y(self, value: float) -> float:
        own = math.log10(value) if self._is_log else value
        share = (own - self._low) / (self._high - self._low)
        return self._bottom - (self._bottom - self._top) * share


def _steps(low: float, high: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * each for each in (5, 2, 1) if power * each <= (high - low) / 4)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _ring(x: float, y: float, colour: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}" fill="#ffffff" stroke="{colour}" '
        'stroke-width="2"/>'
    )
