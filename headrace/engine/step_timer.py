"""The time of steps, and whether it allows another sequence."""

from collections import deque

WINDOW = 5
"""Number of steps whose median is compared with the target. It is odd, and a median ignores one
slow step.
"""


class StepTimer:
    """Holds back admissions while steps take longer than `target_ms` milliseconds; 0 turns it off.

    A step gives every decoding sequence one token, so the time of a step is the time between
    tokens. The times are forgotten at each admission, so each admission rests on new measurements.
    Only the order of work depends on them, never a token.
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
