"""SVG picture of quality against speed, with the Pareto frontier."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.measure.frontier import Candidate, pareto_frontier
from headrace.planner.svg import COLOURS, FAINT, GRID, INK, document, haloed, line, text

_WIDTH, _HEIGHT = 900, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 860, 84, 530
_MIN_RADIUS, _MAX_RADIUS = 4.0, 16.0
_MIN_LOSS = 1e-4
_GREY = "#c4ccd4"
_BARS_WIDTH, _BAR_PITCH, _BAR_LABELS = 420, 20, 150


class Bar(NamedTuple):
    """Speed of an exact draft over plain decoding."""

    value: float
    label: str


def frontier_svg(
    title: str,
    candidates: Sequence[Candidate],
    loss: str,
    *,
    area: Mapping[str, float] | None = None,
    area_label: str = "bytes of its weights",
    bars: Mapping[str, Bar] | None = None,
) -> str:
    """Draw an SVG document.

    Args:
        loss: label of the quality axis.
        area: what the areas of the circles are proportional to, by name of the candidate; by
            default the bytes of its weights.
        area_label: label of the areas.
        bars: a second panel at the right, with a bar for each name.
    """
    xs = [candidate.decode for candidate in candidates]
    ys = [math.log10(max(candidate.loss, _MIN_LOSS)) for candidate in candidates]
    x_margin = 0.08 * (max(xs) - min(xs)) or 1.0
    y_margin = 0.1 * (max(ys) - min(ys)) or 0.5
    axes = _Axes(
        (min(xs) - x_margin, max(xs) + x_margin),
        (min(ys) - y_margin, max(ys) + y_margin),
    )

    best = pareto_frontier(candidates)
    places = {
        candidate.name: (axes.x(x), axes.y(y))
        for candidate, x, y in zip(candidates, xs, ys, strict=True)
    }
    area = area or {candidate.name: candidate.weight_bytes for candidate in candidates}
    largest = max(area.values())
    radii = {
        name: max(_MIN_RADIUS, _MAX_RADIUS * math.sqrt(size / largest))
        for name, size in area.items()
    }
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(
            _LEFT,
            56,
            f"The line joins the Pareto-optimal ones; grey ones are dominated; the area of a "
            f"circle is the {area_label}",
            fill=FAINT,
        ),
        *_frame(axes, loss),
        line([places[name] for name in best], COLOURS[0], 2, opacity=0.5),
        *(
            _mark(*places[name], radii[name], COLOURS[0] if name in best else _GREY)
            for name in sorted(radii, key=lambda name: -radii[name])
        ),
        *_names(places, radii, best),
    ]
    if not bars:
        return document(title, _WIDTH, _HEIGHT, body)
    body += _bars(bars)
    height = max(_HEIGHT, round(_TOP + _BAR_PITCH * len(bars) + 40))
    return document(title, _WIDTH + _BARS_WIDTH, height, body)


class _Axes:
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
    step = _grid_distance(high - low)
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


def _grid_distance(span: float) -> float:
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
    taken = [
        (x - radii[name], y - radii[name], x + radii[name], y + radii[name])
        for name, (x, y) in places.items()
    ]
    # Formats on the frontier choose their place first.
    for name in sorted(places, key=lambda name: name not in best):
        x, y = places[name]
        gap, width = radii[name] + 3, 6.6 * len(name)
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
        boxes = [(a, b, a + width, b + 12) for a, b in inside]
        box = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        left, top, _, _ = box
        yield from haloed(
            left,
            top + 10,
            name,
            INK if name in best else FAINT,
            weight="bold" if name in best else "",
        )


def _bars(bars: Mapping[str, Bar]) -> Iterator[str]:
    """A bar for each exact draft, next to a line at the speed of the full model."""
    left, right = _WIDTH + _BAR_LABELS, _WIDTH + _BARS_WIDTH - 90
    most = max(1.2, *(bar.value for bar in bars.values()))
    scale = (right - left) / most
    yield text(_WIDTH, _TOP - 28, "As an exact draft: speed over plain decoding", weight="bold")
    yield text(_WIDTH, _TOP - 12, "share of drafted tokens accepted, at the right", fill=FAINT)
    x, bottom = left + scale, _TOP + _BAR_PITCH * len(bars)
    yield line([(x, _TOP - 4), (x, bottom + 4)], INK, 1)
    yield text(x, bottom + 18, "plain", anchor="middle", fill=FAINT)
    for number, (name, bar) in enumerate(bars.items()):
        y, pays = _TOP + _BAR_PITCH * number, bar.value > 1
        width = scale * bar.value
        yield text(left - 8, y + 12, name, anchor="end", fill=INK if pays else FAINT)
        yield (
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{_BAR_PITCH - 6}" '
            f'fill="{COLOURS[0] if pays else _GREY}"/>'
        )
        yield from haloed(left + width + 6, y + 12, bar.label, INK if pays else FAINT)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
