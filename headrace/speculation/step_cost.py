"""The time of a step by its number of rows, learned from measured steps."""

from bisect import bisect_left, insort
from math import exp, log, log2

_PER_OCTAVE = 2
"""Knots from a number of rows to its double."""
_LAST_KNOT = 12 * _PER_OCTAVE
"""The last knot, at 4096 rows; larger steps count as if they had so many."""
_ROW_AT_FIRST = 0.1
"""Time of a row before anything is measured, in times of the fixed part of a step."""
_MAX_ERROR = 0.5
"""Largest error of one step that counts, in logarithms of seconds: a step is further off where
another process had the machine.
"""
_MAX_FIRST_ERROR = 2.0
"""The same at a knot without a measurement."""
_SCALE_RATE = 0.2
"""Share of an error that moves the scale, at knots with many measurements."""
_MAX_SCALE_CHANGE = 0.02
"""Largest change of the scale by one step, as a logarithm: the shape follows the rest of a larger
error, or nothing does.
"""
_SHAPE_RATE = 0.02
"""Smallest share of an error that moves a knot."""
_FIRST_VISIT = 1.5
"""The share of an error that moves a knot is 1 / (visits + this), as in a mean, but never less than
_SHAPE_RATE.
"""


class StepCost:
    """An estimate of the seconds of a step: scale x shape(rows).

    The scale is the speed of the machine at this moment, which other processes share, and follows
    measurements quickly. The shape is how numbers of rows compare with each other, and follows
    slowly, except where there are few measurements. It is a curve through knots, piecewise linear
    in logarithms between the measured ones, and never falls: more rows do not cost less. The two
    can be told apart only if steps of different sizes alternate, so the controller runs plain steps
    now and then.
    """

    def __init__(self) -> None:
        self._scale: float | None = None
        """Logarithm of the scale; None before the first measurement."""
        self._shape: dict[int, float] = {}
        """Logarithm of the shape at each measured knot."""
        self._seen: list[int] = []
        """The measured knots, ascending."""
        self._visits = [0.0] * (_LAST_KNOT + 1)
        """Measured steps at each knot; a step between two knots counts in part for both."""

    def visits(self, rows: int) -> float:
        """Number of measured steps of about so many rows."""
        place = _place(rows)
        knot = int(place)
        return self._visits[knot] + (self._visits[knot + 1] if place > knot else 0.0)

    def seconds(self, rows: int) -> float:
        """Estimated seconds of a step of so many rows, without the time of drafting; 0 before the
        first measurement.
        """
        return (
            0.0
            if self._scale is None or not rows
            else exp(self._scale + self._shape_at(_place(rows)))
        )

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a measured step."""
        if rows <= 0 or seconds <= 0:
            return
        place = _place(rows)
        shape, now = self._shape_at(place), log(seconds)
        if self._scale is None:
            self._scale = now - shape
        error = now - self._scale - shape
        small = min(max(error, -_MAX_ERROR), _MAX_ERROR)
        knot, after = int(place), place - int(place)
        trust = 1.0
        for moved, weight in ((knot, 1 - after), (knot + 1, after)) if after else ((knot, 1.0),):
            visits = self._visits[moved]
            used = small if visits else min(max(error, -_MAX_FIRST_ERROR), _MAX_FIRST_ERROR)
            trust = min(trust, visits / (visits + 2))
            self._move(moved, weight * used * max(_SHAPE_RATE, 1 / (visits + _FIRST_VISIT)))
            self._visits[moved] += weight
        self._scale += min(max(_SCALE_RATE * trust * small, -_MAX_SCALE_CHANGE), _MAX_SCALE_CHANGE)

    def _move(self, knot: int, change: float) -> None:
        """Move the curve at a knot, and other knots as far as it takes for the curve not to
        fall.
        """
        shape, seen = self._shape, self._seen
        if knot not in shape:
            shape[knot] = self._shape_at(knot)
            insort(seen, knot)
        height = shape[knot] = shape[knot] + change
        at = seen.index(knot)
        for other in seen[at + 1 :]:
            if shape[other] >= height:
                break
            shape[other] = height
        for other in reversed(seen[:at]):
            if shape[other] <= height:
                break
            shape[other] = height

    def _shape_at(self, place: float) -> float:
        """Logarithm of the shape between knots; outside the measured ones it runs parallel to the
        first curve.
        """
        seen, shape = self._seen, self._shape
        at = bisect_left(seen, place)
        if at < len(seen) and seen[at] == place:
            return shape[seen[at]]
        if 0 < at < len(seen):
            left, right = seen[at - 1], seen[at]
            return shape[left] + (shape[right] - shape[left]) * (place - left) / (right - left)
        if not seen:
            return _first(place)
        nearest = seen[min(at, len(seen) - 1)]
        return shape[nearest] + _first(place) - _first(nearest)


def _place(rows: int) -> float:
    """The place of a number of rows among the knots; a fraction between two of them."""
    return min(_PER_OCTAVE * log2(rows), _LAST_KNOT)


def _first(place: float) -> float:
    """Logarithm of the shape before anything is measured."""
    return log(1 + _ROW_AT_FIRST * 2 ** (place / _PER_OCTAVE))
