"""How long steps take, and whether that leaves room for one more sequence."""

from collections import deque
from statistics import median

WINDOW = 5
"""Steps whose median counts: one that was disturbed does not."""


class StepTimer:
    """Holds admissions back while steps take longer than `target_ms`; 0: never.

    Every decoding sequence gets a token a step, so the time of a step is the time of a token. After an admission it is measured
    anew, so that no more than one sequence is admitted on old figures. It decides who waits, never what a token is.
    """

    def __init__(self, target_ms: float) -> None:
        self._target = target_ms / 1000
        self._seconds = deque[float](maxlen=WINDOW)

    def record(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds.append(seconds)

    def admit(self) -> None:
        """A sequence was admitted."""
        self._seconds.clear()

    @property
    def allows(self) -> bool:
        """Whether there is room for one more."""
        return not self._target or (len(self._seconds) == WINDOW and median(self._seconds) <= self._target)
