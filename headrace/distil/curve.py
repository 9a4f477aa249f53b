"""The curve of a training: the loss, and figures over held-out texts, by step."""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from headrace.record import frozen


@frozen(kw_only=True)
class Point:
    """Figures after a number of steps."""

    step: int
    seconds: float
    """Seconds of training."""
    loss: float | None = None
    """Mean over the steps since the last point; None before the first step."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """Figures over texts that are not trained on, by name; empty between evaluations."""


@frozen
class Curve:
    """The points of a training, in the order of their steps."""

    points: tuple[Point, ...] = ()

    def with_point(self, point: Point) -> "Curve":
        return Curve((*self.points, point))

    @property
    def evaluated(self) -> list[Point]:
        """The points with figures over held-out texts."""
        return [point for point in self.points if point.held_out]

    def facts(self) -> list[dict[str, Any]]:
        """The points for JSON."""
        return [asdict(point) for point in self.points]


def read_curve(facts: list[dict[str, Any]]) -> Curve:
    """Make a curve of the `facts` of another."""
    return Curve(tuple(Point(**each) for each in facts))
