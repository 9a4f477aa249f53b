"""A device that is late, for tests: what it is given waits until the host waits for it, or has to work on tensors by itself."""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.stream import HostStream, Mark


class LateStream(HostStream):
    """Does nothing before it must. What it copies from is spoilt once it has been read: the host may not count on it."""

    has_graphs = True

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._given = 0
        self.late = 0
        """Launches that waited."""
        self.captured = 0
        self.replayed = 0

    def run(self, launches: Sequence[Launch]) -> None:
        self._give(lambda: super(LateStream, self).run(launches))

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        self.captured += 1
        own = list(launches)

        def again() -> None:
            self.replayed += 1
            self.run(own)

        return again

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        def copy() -> None:
            to.copy_(source)
            if source.dtype == torch.int32 and to.numel() != source.numel():  # a part of the numbers of steps
                source.fill_(-77)

        self._give(copy)

    def times(self, launches: Sequence[Launch]) -> list[float]:
        self.catch_up()
        return super().times(launches)

    def mark(self) -> Mark:
        return _LateMark(self, self._given)

    def catch_up(self) -> None:
        self.late += len(self._waiting)
        self.run_until(self._given)

    def run_until(self, number: int) -> None:
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()[1]()

    def is_past(self, number: int) -> bool:
        return not self._waiting or self._waiting[0][0] > number

    def _give(self, work: Callable[[], None]) -> None:
        self._given += 1
        self._waiting.append((self._given, work))


class _LateMark:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.is_past(self._number)

    def synchronize(self) -> None:
        self._stream.run_until(self._number)
