"""A late device for tests: work waits until the host waits for it, or needs tensors itself."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import torch

from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.stream import HostStream, Mark


class LateStream(HostStream):
    """Runs work as late as possible, and overwrites source memory after a copy.

    An overlapped copy runs when other work waits for it, or, if `is_early`, once its
    marks are reached. With a `speed` above 0 the device runs ahead at random moments: with 1 it
    runs all work at once.
    """

    has_graphs = True

    def __init__(self, is_early: bool = False) -> None:
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._given = 0
        self._done = 0
        self._is_early = is_early
        self._overlapped: list[_OverlappedCopy] = []
        """Copies to run early."""
        self.late = 0
        """Launches that waited."""
        self.late_copies = 0
        """Overlapped copies that did not run at once."""
        self.captured = 0
        self.replayed = 0
        self.speed = 0.0
        self.random = Random(0)

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
            if (
                source.dtype == torch.int32 and to.numel() != source.numel()
            ):  # a part of the numbers of steps
                source.fill_(-77)

        self._give(copy)

    def copy_overlapped(
        self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]
    ) -> Mark:
        assert to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
        copy = _OverlappedCopy(to, source, after)
        if self._is_early:
            self._overlapped.append(copy)
            self._copy_early()
        self.late_copies += not copy.query()
        return copy

    def times(self, launches: Sequence[Launch]) -> list[float]:
        self.catch_up()
        return super().times(launches)

    def mark(self) -> Mark:
        return _LateMark(self, self._given)

    def wait_for(self, mark: Mark) -> None:
        self._give(mark.synchronize)

    def catch_up(self) -> None:
        self.late += len(self._waiting)
        self.run_until(self._given)

    def run_until(self, number: int) -> None:
        while self._waiting and self._waiting[0][0] <= number:
            own, work = self._waiting.popleft()
            try:
                work()
            finally:
                self._done = own
            self._copy_early()

    def is_past(self, number: int) -> bool:
        return self._done >= number

    def _give(self, work: Callable[[], None]) -> None:
        self._given += 1
        self._waiting.append((self._given, work))
        if self.random.random() < self.speed:
            first = self._done + 1 if self.speed < 1 else self._given
            self.run_until(self.random.randint(first, self._given))

    def _copy_early(self) -> None:
        """Run the overlapped copies that are ready, and the copies that become ready."""
        while ready := [copy for copy in self._overlapped if copy.is_ready]:
            for copy in ready:
                copy.synchronize()
            self._overlapped = [copy for copy in self._overlapped if not copy.query()]


class _LateMark:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.is_past(self._number)

    def synchronize(self) -> None:
        self._stream.run_until(self._number)


class _OverlappedCopy:
    """A copy and its mark."""

    def __init__(self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]) -> None:
        self._to, self._source, self._after = to, source, tuple(after)
        self._made = False

    @property
    def is_ready(self) -> bool:
        return all(mark.query() for mark in self._after)

    def query(self) -> bool:
        return self._made

    def synchronize(self) -> None:
        if not self._made:
            for mark in self._after:
                mark.synchronize()
            self._to.copy_(self._source)
            self._made, self._after = True, ()
