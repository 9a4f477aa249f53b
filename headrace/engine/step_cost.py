"""What a step costs by its number of rows, learned from the steps themselves."""

from itertools import pairwise
from math import exp, log, log2

_PER_OCTAVE = 2
"""Knots between a number of rows and its double."""
_NUM_KNOTS = 12 * _PER_OCTAVE + 1
_ROW_AT_FIRST = 0.1
"""What a row costs beside the fixed part of a step, before anything is measured."""
_LARGEST_ERROR = 0.7
"""Of the logarithm of a time: one step may be off by more, since somebody else had the machine, and must not count for more."""
_PACE = 0.2
_SHAPE = 0.02
_FIRST_VISITS = 0.5


class StepCost:
    """Seconds of a step as pace x shape(rows).

    The pace is that of the machine at this moment, which others share, and follows quickly. The shape is how rows compare with
    each other, and follows slowly, except at numbers of rows that have hardly been seen. It is a curve through knots, and
    never falls: more rows do not cost less.
    """

    def __init__(self) -> None:
        self._pace: float | None = None  # logarithms, all of them
        self._shape = [log(1 + _ROW_AT_FIRST * 2 ** (knot / _PER_OCTAVE)) for knot in range(_NUM_KNOTS)]
        self._visits = [0.0] * _NUM_KNOTS

    @property
    def known(self) -> bool:
        """Whether a step has been measured."""
        return self._pace is not None

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
        error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        trust = 1.0
        for place, weight in ((knot, 1 - after), (knot + 1, after)):
            if weight:
                visits = self._visits[place]
                trust = min(trust, (visits + 1) / (visits + 1 + 1 / _FIRST_VISITS))
                self._shape[place] += weight * error * max(_SHAPE, _FIRST_VISITS / (1 + visits))
                self._visits[place] += weight
        self._pace += _PACE * trust * error
        self._level(knot)

    def _level(self, knot: int) -> None:
        """Give way to a knot that has moved, so that the curve does not fall."""
        shape = self._shape
        for left, right in reversed(list(pairwise(range(knot + 1)))):
            shape[left] = min(shape[left], shape[right])
        for left, right in pairwise(range(knot, _NUM_KNOTS)):
            shape[right] = max(shape[right], shape[left])

    def _shape_at(self, rows: int) -> float:
        knot, after = self._place(rows)
        if after == 0:
            return self._shape[knot]
        return (1 - after) * self._shape[knot] + after * self._shape[knot + 1]

    def _place(self, rows: int) -> tuple[int, float]:
        """The knot at or below a number of rows, and how far it is from there to the next."""
        at = min(_PER_OCTAVE * log2(rows), _NUM_KNOTS - 1 - 1e-9)
        return int(at), at - int(at)
