"""What ways to quantise a model cost and give, as an SVG picture: quality against speed, and the
frontier between them.
"""

import math
from collections.abc import Iterator, Sequence

from headrace.measure.frontier import Candidate, frontier
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text

_WIDTH, _HEIGHT = 900, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 860, 84, 530
_RADII = (4.0, 16.0)
"""Of the smallest model and of the largest; areas go with bytes."""
_LEAST_LOSS = 1e-4
"""What less counts as on an axis of powers of ten."""


def frontier_svg(title: str, candidates: Sequence[Candidate], loss: str) -> str:
    """The picture as an XML document; `loss` says what is lost."""
    xs = [each.decode for each in candidates]
    ys = [math.log10(max(each.loss, _LEAST_LOSS)) for each in candidates]
    x_air, y_air = 0.08 * (max(xs) - min(xs)) or 1.0, 0.1 * (max(ys) - min(ys)) or 0.5
    axes = _Axes((min(xs) - x_air, max(xs) + x_air), (min(ys) - y_air, max(ys) + y_air))
    best = frontier(candidates)
    places = {
        each.name: (axes.x(x), axes.y(y)) for each, x, y in zip(candidates, xs, ys, strict=True)
    }
    largest = max(each.weight_bytes for each in candidates)
    radii = {
        each.name: max(_RADII[0], _RADII[1] * math.sqrt(each.weight_bytes / largest))
        for each in candidates
    }
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(
            _LEFT,
            56,
            "The line joins what nothing surpasses in quality and speed at once; areas "
            "are bytes of weights",
            fill=FAINT,
        ),
        *_frame(axes, loss),
        line([places[name] for name in best], COLOURS[0], 2, opacity=0.5),
        *(
            _mark(*places[name], radii[name], COLOURS[0 if name in best else 1])
            for name in sorted(radii, key=lambda name: -radii[name])
        ),
        *_names(places, radii, best),
    ]
    return document(title, _WIDTH, _HEIGHT, body)


class _Axes:
    """Tokens/s and powers of ten of a loss, on the page; less is lost further up."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (_RIGHT - _LEFT) * (value - low) / (high - low)

    def y(self, power: float) -> float:
        low, high = self.y_range
        return _TOP + (_BOTTOM - _TOP) * (power - low) / (high - low)


def _frame(axes: _Axes, loss: str) -> Iterator[str]:
    low, high = axes.x_range
    step = _step(high - low)
    for i in range(math.ceil(max(low, 0) / step), math.floor(high / step) + 1):
        x = axes.x(i * step)
        yield line([(x, _TOP), (x, _BOTTOM)], GRID, 1)
        yield text(x, _BOTTOM + 18, f"{i * step:,g}", anchor="middle")
    for power in range(math.floor(axes.y_range[0]), math.ceil(axes.y_range[1]) + 1):
        for value in (1, 2, 5):
            y = axes.y(power + math.log10(value))
            if _TOP <= y <= _BOTTOM:
                yield line([(_LEFT, y), (_RIGHT, y)], GRID, 1)
                yield text(_LEFT - 8, y + 4, f"{value * 10.0**power:g}", anchor="end")
    yield line([(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], INK, 1)
    yield text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "decode, tokens/s", anchor="middle", size=13)
    yield text(22, (_TOP + _BOTTOM) / 2, loss, anchor="middle", size=13, turn=-90)


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to ten steps."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(power * step for step in (5, 2, 1) if power * step <= span / 4)


def _mark(x: float, y: float, radius: float, colour: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" '
        'fill-opacity="0.7" stroke="#ffffff"/>'
    )


def _names(
    places: dict[str, tuple[float, float]], radii: dict[str, float], best: Sequence[str]
) -> Iterator[str]:
    """Each name right of its point, or left, above or below it, wherever the least is covered."""
    taken = [
        (x - radii[name], y - radii[name], x + radii[name], y + radii[name])
        for name, (x, y) in places.items()
    ]
    for name in sorted(places, key=lambda name: name not in best):
        (x, y), gap, width = places[name], radii[name] + 3, 6.6 * len(name)
        corners = [
            (x + gap, y - 6),
            (x - gap - width, y - 6),
            (x - width / 2, y - gap - 12),
            (x - width / 2, y + gap),
        ]
        inside = [
            (a, b)
            for a, b in corners
            if a > _LEFT and a + width < _RIGHT and b > _TOP and b + 12 < _BOTTOM
        ] or corners
        left, top = min(
            inside,
            key=lambda at: sum(_overlap((*at, at[0] + width, at[1] + 12), box) for box in taken),
        )
        taken.append((left, top, left + width, top + 12))
        yield from haloed(
            left,
            top + 10,
            name,
            INK if name in best else FAINT,
            weight="bold" if name in best else "",
        )


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return wide * high if wide > 0 and high > 0 else 0.0
