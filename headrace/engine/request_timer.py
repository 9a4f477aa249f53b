"""The time of a request, split into the work that it waited for."""

from collections.abc import Callable
from types import TracebackType

from headrace.outputs import Timing


class WorkTimer:
    """Sums the seconds of the `with` blocks of one thread, also in the midst of a block."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._begun: float | None = None

    def __enter__(self) -> None:
        self._begun = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._seconds, self._begun = self.until(self._clock()), None

    def until(self, now: float) -> float:
        """Seconds of all blocks until `now`, which is no earlier than the begin of this block."""
        return self._seconds if self._begun is None else self._seconds + now - self._begun


class RequestTimer:
    """Splits the time of a request into queue, prefill, decode and detokenising, in seconds.

    All requests of an engine share `detokeniser`, so that a token costs no reading of the clock.
    """

    def __init__(self, clock: Callable[[], float], detokeniser: WorkTimer) -> None:
        self._clock = clock
        self._detokeniser = detokeniser
        self.added = clock()
        self.started: float | None = None
        self.first_token: float | None = None
        self._before_start = self._before_token = 0.0
        """Seconds of the detokeniser."""

    def start(self) -> bool:
        if self.started is not None:
            return False
        self.started = self._clock()
        self._before_start = self._detokeniser.until(self.started)
        return True

    def token(self) -> None:
        if self.first_token is None:
            self.first_token = self._clock()
            self._before_token = self._detokeniser.until(self.first_token)

    def timing(self) -> Timing:
        """The parts until now; they sum to the time since the request was added."""
        now = self._clock()
        total = self._detokeniser.until(now)
        started, before_start = self.started, self._before_start
        first_token, before_token = self.first_token, self._before_token
        if started is None:
            started, before_start = now, total
        if first_token is None:
            first_token, before_token = now, total
        return Timing(
            queue=started - self.added,
            prefill=max(0.0, first_token - started - (before_token - before_start)),
            decode=max(0.0, now - first_token - (total - before_token)),
            detokenise=total - before_start,
        )
