"""The deadlines of requests."""

from heapq import heapify, heappop, heappush

from headrace.engine.sequence import Request

_MAX_SPARE = 16


class Deadlines:
    """A heap of deadlines, in seconds of the engine's clock, with lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # time, number, request
        self._live: set[Request] = set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, time: float, request: Request) -> None:
        self._live.add(request)
        heappush(self._heap, (time, request.number, request))

    def discard(self, request: Request) -> None:
        self._live.discard(request)
        if len(self._heap) > 2 * len(self._live) + _MAX_SPARE:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapify(self._heap)

    def pop_overdue(self, now: float) -> list[Request]:
        requests = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request in self._live:
                self._live.remove(request)
                requests.append(request)
        return requests
