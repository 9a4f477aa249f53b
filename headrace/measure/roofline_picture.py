"""SVG picture of a roofline with ops as points (Williams et al. 2009).

Colour is the op, shape the phase, area the share of the phase's time.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.measure.op_profile import OpProfile, PhaseProfile
from headrace.planner.hardware import KINDS, Machine
from headrace.planner.svg import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    document,
    haloed,
    line,
    pairs,
    plain,
    text,
)
from headrace.program.op import Kind

WIDTH, HEIGHT = 1000, 656
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 748, 84, 572
_SHAPES = ("circle", "square", "up", "diamond", "down", "pentagon", "star", "hexagon", "cross")
_MIN_RADIUS = 3.5
_MAX_RADIUS = 13.0
_TERA = 2e13
"""Operations/s above which rates are in T."""
_MIN_FLOOR_SHARE = 0.01
"""Minimum share of a phase's floor for an op to be drawn."""

_Box = tuple[float, float, float, float]


class _Point(NamedTuple):
    op: OpProfile
    phase: str
    share: float
    x: float
    y: float
    colour: str
    shape: str

    @property
    def radius(self) -> float:
        return max(_MIN_RADIUS, _MAX_RADIUS * math.sqrt(self.share))


class _Axes:
    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_range, self.y_range = _span(xs), _span(ys)
        self.unit, self.prefix = (1e12, "T") if max(ys) > _TERA else (1e9, "G")

    def x(self, intensity: float) -> float:
        low, high = self.x_range
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(intensity) - low) / (high - low)

    def y(self, rate: float) -> float:
        low, high = self.y_range
        return _BOTTOM - (_BOTTOM - _TOP) * (math.log10(rate) - low) / (high - low)


def roofline_svg(
    title: str, machine: Machine, profiles: Sequence[PhaseProfile], subtitle: str = ""
) -> str:
    """Draw an SVG document; a note names the ops that are not drawn.

    The default subtitle is that of a measured profile.
    """
    drawn = {
        op.name
        for p in profiles
        for op in p.ops
        if op.bytes and op.flops and op.floor >= _MIN_FLOOR_SHARE * p.floor
    }
    plotted = [(p, op) for p in profiles for op in p.ops if op.name in drawn and op.seconds]
    kinds = [kind for kind in KINDS if any(op.kind == kind for _, op in plotted)]
    xs = [op.flops / op.bytes for _, op in plotted] + [machine.ridge(kind) for kind in kinds]
    ys = [op.flops / op.seconds for _, op in plotted] + [
        machine.rates[kind] * 1.2 for kind in kinds
    ]
    axes = _Axes(xs or [1.0], ys or [1.0])
    total = {op.name: sum(o.seconds for _, o in plotted if o.name == op.name) for _, op in plotted}
    colours = {
        name: COLOURS[i % len(COLOURS)]
        for i, name in enumerate(sorted(total, key=lambda name: -total[name]))
    }
    shapes = {p.phase.name: _SHAPES[i % len(_SHAPES)] for i, p in enumerate(profiles)}
    points = [_point(axes, p, op, colours[op.name], shapes[p.phase.name]) for p, op in plotted]
    taken = [(p.x - p.radius, p.y - p.radius, p.x + p.radius, p.y + p.radius) for p in points]
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, subtitle or _subtitle(machine), fill=FAINT),
        *_frame(axes),
        *_paths(points),
        *_roof(axes, machine, kinds, taken),
        *(_mark(p) for p in sorted(points, key=lambda p: -p.share)),
        *_names(points, taken),
        *_legend(colours, shapes),
        *_not_drawn(profiles, drawn),
    ]
    return document(title, WIDTH, HEIGHT, body)


def _subtitle(machine: Machine) -> str:
    return (
        f"{machine.cpu}, {machine.at_work}, {machine.isa}; memory and arithmetic measured in "
        "the same run"
    )


def _not_drawn(profiles: Sequence[PhaseProfile], drawn: set[str]) -> Iterator[str]:
    max_shares: dict[str, float] = {}
    for p in profiles:
        for op in p.ops:
            if op.name not in drawn:
                max_shares[op.name] = max(max_shares.get(op.name, 0.0), op.seconds / p.seconds)
    named = [
        f"{name} (up to {100 * share:.0f} %)"
        for name, share in sorted(max_shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    ]
    if named:
        note = f"Not drawn, since they hardly read or compute: {', '.join(named)} of a phase's time"
        yield text(_LEFT, HEIGHT - 14, note, fill=FAINT, size=11)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.08 * (high - low), 0.15)
    return low - margin, high + margin


def _point(axes: _Axes, profile: PhaseProfile, op: OpProfile, colour: str, shape: str) -> _Point:
    return _Point(
        op=op,
        phase=profile.phase.name,
        share=op.seconds / profile.seconds,
        x=axes.x(op.flops / op.bytes),
        y=axes.y(op.flops / op.seconds),
        colour=colour,
        shape=shape,
    )


def _frame(axes: _Axes) -> Iterator[str]:
    for value in _ticks(axes.x_range):
        x = axes.x(value)
        yield line([(x, _TOP), (x, _BOTTOM)], GRID, 1)
        yield text(x, _BOTTOM + 18, _number(value), anchor="middle")
    for value in _ticks(axes.y_range, unit=axes.unit):
        y = axes.y(value)
        yield line([(_LEFT, y), (_RIGHT, y)], GRID, 1)
        yield text(_LEFT - 8, y + 4, _number(value / axes.unit), anchor="end")
    yield line([(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], INK, 1)
    yield text(
        (_LEFT + _RIGHT) / 2,
        _BOTTOM + 42,
        "operations per byte of weights and KV",
        anchor="middle",
        size=13,
    )
    middle = (_TOP + _BOTTOM) / 2
    label = f"{axes.prefix} operations per second"
    yield text(24, middle, label, anchor="middle", size=13, turn=-90)


def _ticks(span: tuple[float, float], unit: float = 1.0) -> list[float]:
    steps = (1,) if span[1] - span[0] > 3.6 else (1, 2, 5)
    decades = range(
        math.floor(span[0] - math.log10(unit)), math.ceil(span[1] - math.log10(unit)) + 1
    )
    values = (step * 10.0**decade * unit for decade in decades for step in steps)
    return [value for value in values if span[0] <= math.log10(value) <= span[1]]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _roof(axes: _Axes, machine: Machine, kinds: Sequence[Kind], taken: list[_Box]) -> Iterator[str]:
    right, left = 10 ** axes.x_range[1], 10 ** axes.x_range[0]
    top = max((machine.rates[kind] for kind in kinds), default=10 ** axes.y_range[1])
    start = max(left, 10 ** axes.y_range[0] / machine.bandwidth)
    slope = [
        (axes.x(start), axes.y(start * machine.bandwidth)),
        (axes.x(top / machine.bandwidth), axes.y(top)),
    ]
    yield line(slope, INK, 2)
    for kind in kinds:
        y = axes.y(machine.rates[kind])
        yield line([(axes.x(machine.ridge(kind)), y), (axes.x(right), y)], INK, 2)
        label = f"{kind} {machine.rates[kind] / axes.unit:,.0f} {axes.prefix} op/s"
        width = 6.3 * len(label)
        ends = range(int(axes.x(right) - 4), int(axes.x(machine.ridge(kind)) + width), -12)
        boxes = [(end - width, y - 19, float(end), y - 2) for end in ends] or [
            (_RIGHT - width, y - 19, _RIGHT, y - 2)
        ]
        box = min(boxes, key=lambda box: _overlap(box, taken))
        taken.append(box)
        yield from haloed(box[0], y - 7, label, INK)
    (x0, y0), (x1, y1) = slope
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    along = [(x0 + t / 40 * (x1 - x0), y0 + t / 40 * (y1 - y0)) for t in range(41)]
    taken += [(x - 2, y - 2, x + 2, y + 2) for x, y in along]
    # The label of the slope lies above the line.
    taken += [(x - 20, y - 20, x, y) for x, y in along[14:31]]
    x, y = along[22]
    yield from haloed(
        x - 6,
        y - 8,
        f"memory {machine.bandwidth / 1e9:,.1f} GB/s",
        INK,
        anchor="middle",
        turn=angle,
    )


def _paths(points: Sequence[_Point]) -> Iterator[str]:
    for name in dict.fromkeys(p.op.name for p in points):
        path = sorted((p for p in points if p.op.name == name), key=lambda p: (p.x, -p.y))
        if len(path) > 1:
            yield line([(p.x, p.y) for p in path], path[0].colour, 1.2, opacity=0.35)


def _mark(p: _Point) -> str:
    label = f"{p.op.name}, {p.phase}: {p.share:.0%} of the time; bound by {p.op.bound}"
    style = f'fill="{p.colour}" fill-opacity="0.82" stroke="#ffffff" stroke-width="0.9"'
    return (
        '<g class="point" '
        f"{style}><title>{plain(label)}</title>{_shape(p.shape, p.x, p.y, p.radius)}</g>"
    )


def _shape(shape: str, x: float, y: float, r: float) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'
    corners = {  # (angle in degrees, distance from the centre in radii)
        "square": [(a, 0.89) for a in (45, 135, 225, 315)],
        "diamond": [(a, 1.25) for a in (0, 90, 180, 270)],
        "up": [(a, 1.3) for a in (90, 210, 330)],
        "down": [(a, 1.3) for a in (30, 150, 270)],
        "pentagon": [(90 + 72 * i, 1.1) for i in range(5)],
        "hexagon": [(60 * i, 1.05) for i in range(6)],
        "star": [(90 + 36 * i, 1.4 if i % 2 == 0 else 0.6) for i in range(10)],
        "cross": [
            (a + d, s) for a in (0, 90, 180, 270) for d, s in ((-18, 1.3), (18, 1.3), (45, 0.57))
        ],
    }[shape]
    points = (
        (x + s * r * math.cos(math.radians(a)), y - s * r * math.sin(math.radians(a)))
        for a, s in corners
    )
    return f'<polygon points="{pairs(points)}"/>'


def _names(points: Sequence[_Point], taken: list[_Box]) -> Iterator[str]:
    for name in dict.fromkeys(p.op.name for p in sorted(points, key=lambda p: -p.share)):
        width, height = 6.6 * len(name) + 4, 13.0
        places = [
            (cost + bias, x, y, p.colour)
            for p in points
            if p.op.name == name
            for bias, x, y in _places(p, width, height)
            for cost in [_overlap((x, y, x + width, y + height), taken)]
            if x >= _LEFT + 2 and x + width <= _RIGHT and y >= _TOP and y + height <= _BOTTOM
        ]
        if places:
            _, x, y, colour = min(places)
            taken.append((x, y, x + width, y + height))
            yield from haloed(x + 2, y + 10, name, colour, weight="bold")


def _places(p: _Point, width: float, height: float) -> Iterator[tuple[float, float, float]]:
    gap = 1.2 * p.radius + 3
    yield 0.0, p.x + gap, p.y - height / 2
    yield 0.5, p.x - gap - width, p.y - height / 2
    yield 1.0, p.x - width / 2, p.y + gap
    yield 1.5, p.x - width / 2, p.y - gap - height


def _overlap(box: _Box, taken: Iterable[_Box]) -> float:
    overlaps = (
        (min(box[2], b[2]) - max(box[0], b[0]), min(box[3], b[3]) - max(box[1], b[1]))
        for b in taken
    )
    return sum(width * height for width, height in overlaps if width > 0 and height > 0)


def _legend(colours: dict[str, str], shapes: dict[str, str]) -> Iterator[str]:
    x, y = _RIGHT + 30, _TOP + 10
    yield text(x, y, "Op", weight="bold")
    for name, colour in colours.items():
        y += 21
        yield f'<rect x="{x}" y="{y - 9}" width="18" height="9" rx="2" fill="{colour}"/>'
        yield text(x + 28, y, name)
    y += 38
    yield text(x, y, "Phase", weight="bold")
    for name, shape in shapes.items():
        y += 21
        yield f'<g fill="{FAINT}">{_shape(shape, x + 9, y - 4, 5.5)}</g>'
        yield text(x + 28, y, name)
    y += 38
    yield text(x, y, "Share of the phase's time", weight="bold")
    y += 24
    left = x + 3.0
    for share in (0.05, 0.2, 0.5):
        r = _MAX_RADIUS * math.sqrt(share)
        yield f'<circle cx="{left + r:.1f}" cy="{y - 4}" r="{r:.1f}" fill="{FAINT}"/>'
        yield text(left + 2 * r + 5, y, f"{100 * share:.0f} %")
        left += 2 * r + 46
