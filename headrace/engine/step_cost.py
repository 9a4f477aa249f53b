"""What a step costs by its number of rows, learned from the steps themselves."""

from bisect import bisect_left, insort
from math import exp, log, log2

_PER_OCTAVE = 2
"""Knots between a number of rows and its double."""
_LAST_KNOT = 12 * _PER_OCTAVE
_ROW_AT_FIRST = 0.1
"""What a row costs beside the fixed part of a step, before anything is measured."""
_LARGEST_ERROR = 0.5
"""Of the logarithm of a time: one step may be off by more, since somebody else had the machine, and must not count for more."""
_FIRST_ERROR = 2.0
"""The same where nothing has been seen."""
_SCALE_RATE = 0.2
_MOST_SCALE_RATE = 0.02
"""For one step. What is left of a larger error belongs to the shape, or to nobody."""
_SHAPE = 0.02
_FIRST_VISIT = 1.5
"""The share of an error that moves a knot is 1 / (visits + this), as in a mean, but never less than _SHAPE."""


class StepCost:
    """Seconds of a step as pace x shape(rows).

    The pace is that of the machine at this moment, which others share, and follows quickly. The shape is how rows compare with
    each other, and follows slowly, except at numbers of rows that have hardly been seen. It is a curve through knots, straight
    between those that have been seen, and never falls: more rows do not cost less. The two can only be told apart where steps
    of different sizes alternate, so who uses this sees to it that plain steps do not die out.
    """

    def __init__(self) -> None:
        self._scale: float | None = None  # logarithms, all of them
        self._shape: dict[int, float] = {}
        """At each knot that has been seen."""
        self._seen: list[int] = []
        """Those knots, ascending."""
        self._visits = [0.0] * (_LAST_KNOT + 1)

    def visits(self, rows: int) -> float:
        """How many steps of about so many rows have been measured."""
        place = _place(rows)
        knot = int(place)
        return self._visits[knot] + (self._visits[knot + 1] if place > knot else 0.0)

    def seconds(self, rows: int) -> float:
        """The time of a step, not counting the time to draft; 0 as long as nothing has been measured."""
        return 0.0 if self._scale is None or not rows else exp(self._scale + self._shape_at(_place(rows)))

    def record(self, rows: int, seconds: float) -> None:
        """A step has taken so long."""
        if rows <= 0 or seconds <= 0:
            return
        place = _place(rows)
        shape, now = self._shape_at(place), log(seconds)
        if self._scale is None:
            self._scale = now - shape
        error = now - self._scale - shape
        small = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        knot, after = int(place), place - int(place)
        trust = 1.0
        for moved, weight in ((knot, 1 - after), (knot + 1, after)) if after else ((knot, 1.0),):
            visits = self._visits[moved]
            used = small if visits else min(max(error, -_FIRST_ERROR), _FIRST_ERROR)
            trust = min(trust, visits / (visits + 2))
            self._move(moved, weight * used * max(_SHAPE, 1 / (visits + _FIRST_VISIT)))
            self._visits[moved] += weight
        self._scale += min(max(_SCALE_RATE * trust * small, -_MOST_SCALE_RATE), _MOST_SCALE_RATE)

    def _move(self, knot: int, change: float) -> None:
        """Move the curve at a knot; the others give way."""
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
    """Where a number of rows is among the knots."""
    return min(_PER_OCTAVE * log2(rows), _LAST_KNOT)


def _first(place: float) -> float:
    """The curve as long as nothing has been seen."""
    return log(1 + _ROW_AT_FIRST * 2 ** (place / _PER_OCTAVE))
