"""The order in which a device works: launches, copies and marks of what is done, one behind the
other, while the host goes on.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.speed import READ_BLOCK, multiply_add
from headrace.backend.cuda.launch import Launch

_HELD_ROUNDS = 10_000
"""Of a multiply-add behind another, for each launch that is timed: some 20 microseconds."""


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """What a device is given to do, in this order."""

    has_graphs: bool
    """Whether graphs save time."""

    def run(self, launches: Sequence[Launch]) -> None:
        """Launch kernels."""

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Make a graph of launches that have run before; what is returned launches them, on the
        same tensors, and nothing runs yet.
        """

    def times(self, launches: Sequence[Launch]) -> list[float]:
        """Launch kernels, wait for them, and say how many seconds each took."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the host, where memory is pinned, and the device, or within the device."""

    def copy_beside(self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]) -> Mark:
        """Copy between the host and the device, both contiguous, while the device goes on with what
        it is given; returns a mark behind it.

        It waits for these marks and for nothing else: copies beside have no other order, neither
        among themselves nor with the rest.
        """

    def mark(self) -> Mark:
        """A mark behind all that was given so far; behind a copy beside only where that was to be
        waited for.
        """

    def wait_for(self, mark: Mark) -> None:
        """Let the device wait for a mark before it does what it is given from now on; the host goes
        on.
        """

    def catch_up(self) -> None:
        """The host is about to work on tensors of the device by itself, behind all that was given
        so far.
        """


class CudaStream:
    """The stream of torch on this thread's GPU, which puts in order by itself all that torch and
    Triton are told to do.
    """

    has_graphs = True

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            launch()

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(launches)
        launch_all: Callable[[], None] = graph.replay
        return launch_all

    def times(self, launches: Sequence[Launch]) -> list[float]:
        # Meanwhile the host comes so far ahead that no kernel waits for its launch: the GPU would
        # be seen to be slow.
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

    def copy_beside(self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]) -> Mark:
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

    def catch_up(self) -> None:
        """Nothing is to do: what the host gives torch to do is in the same order."""

    @cached_property
    def _copying(self) -> dict[str, Any]:
        """Streams for copies to the host and to the device, which has an engine for each; made
        where there is a GPU.
        """
        return {"cpu": torch.cuda.Stream(), "cuda": torch.cuda.Stream()}


class HostStream:
    """Runs everything at once, in the interpreter."""

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

    def copy_beside(self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Mark]) -> Mark:
        to.copy_(source)
        return _Done()

    def mark(self) -> Mark:
        return _Done()

    def wait_for(self, mark: Mark) -> None:
        """It is past."""

    def catch_up(self) -> None:
        """Nothing is ever left to do."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is there."""


def make_stream() -> Stream:
    """The stream of this process's GPU, or of the interpreter."""
    return HostStream() if is_interpreting() else CudaStream()


def host_tensor(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that a device copies from and to while both go on."""
    return torch.zeros(size, dtype=dtype, pin_memory=not is_interpreting())
