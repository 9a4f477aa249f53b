"""When the time of requests is up."""

from heapq import heapify, heappop, heappush

from headrace.engine.sequence import Request

_SPARE = 16
"""Entries of ended requests that are kept in any case."""


class Deadlines:
    """The times at which requests end, in seconds of the engine's clock: a heap, in which those
    that ended earlier are at most as many as the others, and a few.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # time, number, request
        self._live: set[Request] = set()

    def __len__(self) -> int:
        """Requests that are under way and have a deadline."""
        return len(self._live)

    def add(self, time: float, request: Request) -> None:
        """Let a request end at a time, unless it has ended before."""
        self._live.add(request)
        heappush(self._heap, (time, request.number, request))

    def discard(self, request: Request) -> None:
        """Forget a request that has ended, if it has a deadline."""
        self._live.discard(request)
        if len(self._heap) > 2 * len(self._live) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapify(self._heap)

    def overdue(self, now: float) -> list[Request]:
        """The requests whose time is up; they are forgotten."""
        requests = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request in self._live:
                self._live.remove(request)
                requests.append(request)
        return requests
