"""What a step costs by its number of rows, learned from the steps themselves."""

from math import exp, log, log2

_PER_OCTAVE = 2
"""Knots between a number of rows and its double."""
_NUM_KNOTS = 12 * _PER_OCTAVE + 1
_ROW_AT_FIRST = 0.1
"""What a row costs beside the fixed part of a step, before anything is measured."""
_LARGEST_ERROR = 0.5
"""Of the logarithm of a time: one step may be off by more, since somebody else had the machine, and must not count for more."""
_FIRST_ERROR = 2.0
"""The same where nothing has been seen."""
_PACE = 0.2
_MOST_PACE = 0.02
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
        self._pace: float | None = None  # logarithms, all of them
        self._first = [log(1 + _ROW_AT_FIRST * 2 ** (knot / _PER_OCTAVE)) for knot in range(_NUM_KNOTS)]
        self._shape = list(self._first)
        self._visits = [0.0] * _NUM_KNOTS

    def visits(self, rows: int) -> float:
        """How many steps of about so many rows have been measured."""
        knot, after = self._place(rows)
        return self._visits[knot] + self._visits[min(knot + 1, _NUM_KNOTS - 1)] * bool(after)

    def seconds(self, rows: int) -> float:
        """The time of a step, not counting the time to guess; 0 as long as nothing has been measured."""
        return 0.0 if self._pace is None or not rows else exp(self._pace + self._shape_at(rows))

    def record(self, rows: int, seconds: float) -> None:
        """A step has taken so long."""
        if rows <= 0 or seconds <= 0:
            return
        knot, after = self._place(rows)
        if self._pace is None:
            self._pace = log(seconds) - self._shape_at(rows)
        error = log(seconds) - self._pace - self._shape_at(rows)
        small = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        trust = 1.0
        moved = [(place, weight) for place, weight in ((knot, 1 - after), (knot + 1, after)) if weight]
        for place, weight in moved:
            visits = self._visits[place]
            used = small if visits else min(max(error, -_FIRST_ERROR), _FIRST_ERROR)
            trust = min(trust, visits / (visits + 2))
            self._shape[place] += weight * used * max(_SHAPE, 1 / (visits + _FIRST_VISIT))
            self._visits[place] += weight
        self._pace += min(max(_PACE * trust * small, -_MOST_PACE), _MOST_PACE)
        self._draw([place for place, _ in moved])

    def _draw(self, moved: list[int]) -> None:
        """Make the other knots give way to those that have moved, ascending, and draw the curve where nothing has been seen."""
        shape, first = self._shape, self._first
        seen = [knot for knot, visits in enumerate(self._visits) if visits]
        for place in moved:
            for knot in seen:
                shape[knot] = min(shape[knot], shape[place]) if knot < place else max(shape[knot], shape[place])
        left = seen[0]
        for knot in range(left):
            shape[knot] = shape[left] + first[knot] - first[left]
        for right in seen[1:]:
            for knot in range(left + 1, right):
                shape[knot] = shape[left] + (shape[right] - shape[left]) * (knot - left) / (right - left)
            left = right
        for knot in range(left + 1, _NUM_KNOTS):
            shape[knot] = shape[left] + first[knot] - first[left]

    def _shape_at(self, rows: int) -> float:
        knot, after = self._place(rows)
        if after == 0:
            return self._shape[knot]
        return (1 - after) * self._shape[knot] + after * self._shape[knot + 1]

    def _place(self, rows: int) -> tuple[int, float]:
        """The knot at or below a number of rows, and how far it is from there to the next."""
        at = min(_PER_OCTAVE * log2(rows), _NUM_KNOTS - 1 - 1e-9)
        return int(at), at - int(at)
