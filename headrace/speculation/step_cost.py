"""The time of a step by its rows, learned from measured steps."""

from bisect import bisect_left, insort
from math import exp, log, log2

_KNOTS_PER_DOUBLING = 2
_LAST_KNOT = 12 * _KNOTS_PER_DOUBLING
"""Knot at 4096 rows; larger steps count as 4096."""
_DEFAULT_ROW_TIME = 0.1
"""Row time relative to the fixed part of a step."""
_MAX_ERROR = 0.5
"""Logarithm of an error; a larger one comes from another process."""
_MAX_FIRST_ERROR = 2.0
"""Logarithm of an error at a knot without a measurement."""
_SCALE_RATE = 0.2
"""Share of an error that moves the scale."""
_MAX_SCALE_CHANGE = 0.02
_MIN_SHAPE_RATE = 0.02
_FIRST_VISIT = 1.5
"""An error moves a knot by 1 / (visits + _FIRST_VISIT), at least by _MIN_SHAPE_RATE."""


class StepCost:
    """The seconds of a step: scale x shape(rows).

    The scale, the present speed of the machine, follows quickly; the shape follows slowly. It
    never falls, and is piecewise linear in logarithms, with knots at powers of sqrt(2) rows. To
    separate both, the policy runs plain steps now and then.
    """

    def __init__(self) -> None:
        self._scale: float | None = None
        """Logarithm of the scale."""
        self._shape: dict[int, float] = {}
        self._measured: list[int] = []
        self._visits = [0.0] * (_LAST_KNOT + 1)
        """Steps; one between two knots counts in part for both."""

    def visits(self, rows: int) -> float:
        place = _place(rows)
        knot = int(place)
        return self._visits[knot] + (self._visits[knot + 1] if place > knot else 0.0)

    def seconds(self, rows: int) -> float:
        """Seconds of a step without proposers; 0 before the first measurement."""
        if self._scale is None or not rows:
            return 0.0
        return exp(self._scale + self._shape_at(_place(rows)))

    def record(self, rows: int, seconds: float) -> None:
        if rows <= 0 or seconds <= 0:
            return
        place = _place(rows)
        shape, log_seconds = self._shape_at(place), log(seconds)
        if self._scale is None:
            self._scale = log_seconds - shape
        error = log_seconds - self._scale - shape
        bounded_error = _clamp(error, _MAX_ERROR)

        knot, fraction = int(place), place - int(place)
        neighbours = ((knot, 1 - fraction), (knot + 1, fraction)) if fraction else ((knot, 1.0),)
        trust = 1.0
        for neighbour, weight in neighbours:
            visits = self._visits[neighbour]
            knot_error = bounded_error if visits else _clamp(error, _MAX_FIRST_ERROR)
            rate = max(_MIN_SHAPE_RATE, 1 / (visits + _FIRST_VISIT))
            self._move(neighbour, weight * knot_error * rate)
            self._visits[neighbour] += weight
            trust = min(trust, visits / (visits + 2))
        self._scale += _clamp(_SCALE_RATE * trust * bounded_error, _MAX_SCALE_CHANGE)

    def _move(self, knot: int, change: float) -> None:
        shape, measured = self._shape, self._measured
        if knot not in shape:
            shape[knot] = self._shape_at(knot)
            insort(measured, knot)
        height = shape[knot] = shape[knot] + change
        index = measured.index(knot)
        for other in measured[index + 1 :]:
            if shape[other] >= height:
                break
            shape[other] = height
        for other in reversed(measured[:index]):
            if shape[other] <= height:
                break
            shape[other] = height

    def _shape_at(self, place: float) -> float:
        """Logarithm of the shape, parallel to the default curve outside the measured knots."""
        measured, shape = self._measured, self._shape
        index = bisect_left(measured, place)
        if index < len(measured) and measured[index] == place:
            return shape[measured[index]]
        if 0 < index < len(measured):
            left, right = measured[index - 1], measured[index]
            return shape[left] + (shape[right] - shape[left]) * (place - left) / (right - left)
        if not measured:
            return _default_shape(place)
        nearest = measured[min(index, len(measured) - 1)]
        return shape[nearest] + _default_shape(place) - _default_shape(nearest)


def _place(rows: int) -> float:
    return min(_KNOTS_PER_DOUBLING * log2(rows), _LAST_KNOT)


def _default_shape(place: float) -> float:
    return log(1 + _DEFAULT_ROW_TIME * 2 ** (place / _KNOTS_PER_DOUBLING))


def _clamp(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
