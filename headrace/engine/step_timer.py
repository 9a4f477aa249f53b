"""Step times, which hold back admissions."""

from collections import deque

WINDOW = 5
"""Number of steps; their median ignores one slow step."""


class StepTimer:
    """Holds back admissions while steps take longer than `target_ms` milliseconds; 0 turns it
    off.

    Each admission forgets the times.
    """

    def __init__(self, target_ms: float) -> None:
        self._target_seconds = target_ms / 1000
        self._seconds = deque[float](maxlen=WINDOW)

    def record(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def reset(self) -> None:
        self._seconds.clear()

    @property
    def allows_admission(self) -> bool:
        if not self._target_seconds:
            return True
        if len(self._seconds) < WINDOW:
            return False
        median = sorted(self._seconds)[WINDOW // 2]
        return median <= self._target_seconds
