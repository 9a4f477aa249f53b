"""Tells a hanging engine from one that works, by its heartbeat."""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from headrace.remote.heartbeat import Pulse

_STALE_SECONDS = 2.0
"""Heartbeat age of a stalled engine that used no CPU time."""
_STOPPED_SECONDS = 5.0
_LOAD_SECONDS = 1800.0
_PAUSE_SECONDS = 2.0
"""Seconds between two judgements after which this process was paused itself."""


class Verdict(NamedTuple):
    state: Literal["works", "stalls", "hangs"]
    seconds: float
    """Seconds without progress."""


class EngineWatch:
    """Judges only the time that it has watched.

    It starts again when the engine becomes ready, because the load has no heartbeat. It also starts
    again after a pause of this process, because the engine was probably paused as well.
    """

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`stall_seconds`: maximum duration of a step."""
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._since = self._last = clock()
        self._was_loading = True
        self._ticks: int | None = None
        """CPU time of the engine at its last heartbeat."""

    def judge(self, pulse: Pulse, ticks: int | None, *, is_loading: bool) -> Verdict:
        """`ticks`: the engine's CPU time until now."""
        now = self._clock()
        if is_loading != self._was_loading or now - self._last > _PAUSE_SECONDS:
            self._since, self._ticks = now, None
        self._last, self._was_loading = now, is_loading

        watched = now - self._since
        age, step = min(pulse.age, watched), min(pulse.step, watched)
        if age <= _STALE_SECONDS:
            self._ticks = ticks
        uses_no_cpu = age > _STALE_SECONDS and ticks == self._ticks

        seconds = max(age, step)
        if is_loading:
            return Verdict("hangs" if seconds > _LOAD_SECONDS else "works", seconds)
        if seconds > self._stall_seconds or (uses_no_cpu and age > _STOPPED_SECONDS):
            return Verdict("hangs", seconds)
        is_stale = uses_no_cpu or age > _STOPPED_SECONDS
        return Verdict("stalls" if is_stale else "works", age)
