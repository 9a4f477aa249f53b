"""The time of steps, and whether it allows one more sequence."""

from collections import deque

WINDOW = 5  # which is odd
"""Steps whose median is compared with the target, so that one slow step does not count."""


class StepTimer:
    """Holds back admissions while steps take longer than `target_ms` milliseconds; 0: never.

    Every decoding sequence gets a token in a step, so the time of a step is the time of a token. It
    is measured anew after each admission, so that no two sequences are admitted by the same
    figures. It decides which sequences wait, and never a token.
    """

    def __init__(self, target_ms: float) -> None:
        self._target = target_ms / 1000
        self._seconds = deque[float](maxlen=WINDOW)

    def record(self, seconds: float) -> None:
        """Record the seconds of a step."""
        self._seconds.append(seconds)

    def admit(self) -> None:
        """Forget the recorded steps: a sequence was admitted."""
        self._seconds.clear()

    @property
    def allows(self) -> bool:
        """Whether one more sequence may be admitted."""
        return not self._target or (
            len(self._seconds) == WINDOW and sorted(self._seconds)[WINDOW // 2] <= self._target
        )
