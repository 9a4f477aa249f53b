"""SVG picture of the time per token against the batch, with the knee."""

import math
from collections.abc import Iterator, Sequence

from headrace.measure.batch_curve import BatchCurve, BatchPoint
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text

WIDTH, HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 960, 84, 390


def batch_svg(title: str, subtitle: str, curve: BatchCurve) -> str:
    """Draw an SVG document; the batch is on a logarithmic axis."""
    axes = _Axes(curve.points)
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, subtitle, fill=FAINT),
        *_frame(axes, curve.points),
        *_curve(axes, curve),
        *_knee(axes, curve),
    ]
    return document(title, WIDTH, HEIGHT, body)


class _Axes:
    def __init__(self, points: Sequence[BatchPoint]) -> None:
        self.most = points[-1].batch
        self.slowest = 1.08 * max(point.per_token for point in points)

    def x(self, batch: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * math.log2(batch) / max(1.0, math.log2(self.most))

    def y(self, seconds: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * seconds / self.slowest


def _frame(axes: _Axes, points: Sequence[BatchPoint]) -> Iterator[str]:
    for power in range(axes.most.bit_length()):
        x = axes.x(1 << power)
        yield line([(x, _TOP), (x, _BOTTOM)], GRID, 1)
        yield text(x, _BOTTOM + 18, f"{1 << power:,}", anchor="middle")
    step = _grid_distance(1e3 * axes.slowest)
    for i in range(int(1e3 * axes.slowest / step) + 1):
        y = axes.y(1e-3 * i * step)
        yield line([(_LEFT, y), (_RIGHT, y)], GRID, 1)
        yield text(_LEFT - 8, y + 4, f"{i * step:,g}", anchor="end")
    yield line([(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], INK, 1)
    middle = (_LEFT + _RIGHT) / 2
    yield text(middle, _BOTTOM + 42, "sequences that decode together", anchor="middle", size=13)
    label = "ms per token of a sequence"
    yield text(22, (_TOP + _BOTTOM) / 2, label, anchor="middle", size=13, turn=-90)


def _grid_distance(span: float) -> float:
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(power * step for step in (5, 2, 1) if power * step <= span / 4)


def _curve(axes: _Axes, curve: BatchCurve) -> Iterator[str]:
    places = [(axes.x(point.batch), axes.y(point.per_token)) for point in curve.points]
    num_fits = sum(point.fits for point in curve.points)
    yield line(places[:num_fits], COLOURS[0], 2.5)
    yield line(places[max(0, num_fits - 1) :], COLOURS[0], 2.5, opacity=0.3)
    for point, (x, y) in zip(curve.points, places, strict=True):
        label = f"{point.batch:,} sequences: {1e3 * point.per_token:,.2f} ms a token"
        opacity = "" if point.fits else ' opacity="0.35"'
        yield (
            f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[0]}"{opacity}>'
            f"<title>{label}</title></circle>"
        )
    # Labels stand above the curve, apart from each other and from the knee.
    right = -math.inf
    knee = axes.x(curve.knee) if curve.knee else -math.inf
    for point, (x, y) in zip(curve.points, places, strict=True):
        label = f"{point.tokens_per_second:,.0f}/s"
        width = 6.3 * len(label)
        if point.batch & (point.batch - 1) == 0 and x - width / 2 > max(right, _LEFT) + 4:
            right = x + width / 2
            if right < _RIGHT and abs(x - knee) > width / 2:
                yield from haloed(x, y - 12, label, FAINT, anchor="middle")
    fitting = [point.batch for point in curve.points if point.fits]
    if fitting and len(fitting) < len(curve.points):
        note = f"pale: the KV of more than {fitting[-1]:,} sequences does not fit"
        yield from haloed(_LEFT + 10, _TOP + 34, note, FAINT)


def _knee(axes: _Axes, curve: BatchCurve) -> Iterator[str]:
    alone = curve.points[0].per_token
    y = axes.y(alone)
    dash = 'stroke-dasharray="5 4"'
    yield (f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="{FAINT}" {dash}/>')
    if curve.knee is None:
        return
    x, y = axes.x(curve.knee), axes.y(2 * alone)
    yield (
        f'<line class="knee" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}" '
        f'stroke="{COLOURS[1]}" stroke-width="1.5" {dash}/>'
    )
    label = f"knee: {curve.knee:,} sequences"
    anchor = "end" if x > (_LEFT + _RIGHT) / 2 else "start"
    shift = -8 if anchor == "end" else 8
    yield from haloed(x + shift, _TOP + 14, label, COLOURS[1], weight="bold", anchor=anchor)
