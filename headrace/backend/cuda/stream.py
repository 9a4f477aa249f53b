"""Streams: ordered launches, copies and marks on a device, asynchronous to the host."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.speed import READ_BLOCK, multiply_add
from headrace.backend.cuda.launch import Launch

_HELD_ROUNDS = 10_000  # Dependent multiply-adds per timed launch, about 20 microseconds


class Mark(Protocol):
    """A position in a stream."""

    def query(self) -> bool:
        """Whether the device has reached the mark."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work of a device, in order."""

    has_graphs: bool  # Whether graphs save time

    def run(self, launches: Sequence[Launch]) -> None: ...

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Make a graph of launches that have run before; return a function that runs it."""

    def times(self, launches: Sequence[Launch]) -> list[float]:
        """Run launches, wait for them, and return the seconds of each."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between pinned host memory and the device, or within the device."""

    def copy_overlapped(
        self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]
    ) -> Mark:
        """Copy contiguous memory between host and device while the stream runs; return
        its mark.

        The copy waits only for the marks in `after`.
        """

    def mark(self) -> Mark:
        """A mark after all earlier work, without overlapped copies."""

    def wait_for(self, mark: Mark) -> None:
        """Make later work on the device wait for a mark."""

    def catch_up(self) -> None:
        """Prepare for tensor operations of the host, after all earlier work."""


class CudaStream:
    """torch's stream on this thread's GPU, which also orders work of torch and Triton."""

    has_graphs = True

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            launch()

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        # torch's own `graph` would wait for the device and free its cache, in the middle of
        # serving. Here a capture runs nothing and allocates nothing, and calls of other threads
        # are no part of it.
        if not launches:
            return lambda: None
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a collected tensor may query an event, which a capture forbids
        try:
            with torch.cuda.stream(self._capturing):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.run(launches)
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        launch_all: Callable[[], None] = graph.replay
        return launch_all

    def times(self, launches: Sequence[Launch]) -> list[float]:
        # Keep the GPU busy until the host is far ahead: a kernel that waits for its launch would
        # look slow.
        multiply_add(torch.zeros(READ_BLOCK, device="cuda"), _HELD_ROUNDS * len(launches))()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
        for event, launch in zip(events, launches, strict=False):
            event.record()
            launch()
        events[-1].record()
        events[-1].synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in pairwise(events)]

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def copy_overlapped(
        self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]
    ) -> Mark:
        with torch.cuda.stream(self._copying[to.device.type]):
            for mark in after:
                self.wait_for(mark)
            self.copy(to, source)
            return self.mark()

    def mark(self) -> Mark:
        event: Mark = torch.cuda.Event()
        torch.cuda.current_stream().record_event(event)
        return event

    def wait_for(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def catch_up(self) -> None: ...

    @cached_property
    def _capturing(self) -> Any:
        return torch.cuda.Stream()

    @cached_property
    def _copying(self) -> dict[str, Any]:
        # The GPU has one copy engine per direction.
        return {"cpu": torch.cuda.Stream(), "cuda": torch.cuda.Stream()}


class HostStream:
    """Runs all work at once, in the interpreter."""

    has_graphs = False

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            launch()

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        return lambda: self.run(launches)

    def times(self, launches: Sequence[Launch]) -> list[float]:
        clock = [time.perf_counter()]
        for launch in launches:
            launch()
            clock.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(clock)]

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def copy_overlapped(
        self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]
    ) -> Mark:
        to.copy_(source)
        return _Done()

    def mark(self) -> Mark:
        return _Done()

    def wait_for(self, mark: Mark) -> None: ...

    def catch_up(self) -> None: ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def make_stream() -> Stream:
    return HostStream() if is_interpreting() else CudaStream()


def host_tensor(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Pinned host memory, which a device copies asynchronously; plain memory without a GPU."""
    is_pinned = not is_interpreting() and torch.cuda.is_available()
    return torch.zeros(size, dtype=dtype, pin_memory=is_pinned)
