"""Results of a launch on their way from the device to the host, and the memory there that they come
to.
"""

from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.backend.cuda.step_input import StepInput
from headrace.backend.cuda.stream import Mark, host_tensor
from headrace.batch import Ints
from headrace.logit_ops import StepResult

MOST_SLOTS = 40
"""Launches whose numbers are in the host's memory at a time: two steps of multi-step decoding, so
that the device works on the launches of one while the host reads those of the other.
"""


class HostArray:
    """Memory of the host that the device copies from and to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.array: NDArray[Any] = tensor.numpy()
        """The same memory."""
        self._step: StepInput | None = None
        self._views: list[Ints] = []

    def views(self, step: StepInput) -> list[Ints]:
        """The parts of the numbers of a step, which are looked up once for steps of one shape."""
        if self._step is not step:
            self._step, self._views = step, step.views(self.array)
        return self._views


class Slot:
    """Memory of the host for the numbers of one launch."""

    def __init__(self) -> None:
        self._whole: dict[str, HostArray] = {}
        self._parts: dict[str, tuple[tuple[int, ...], HostArray]] = {}
        self.mark: Mark | None = None
        """Behind the launch that used it last."""

    def at_least(self, name: str, size: int, dtype: torch.dtype = torch.int32) -> HostArray:
        """So many numbers, or more."""
        whole = self._whole.get(name)
        if whole is None or whole.tensor.numel() < size:
            whole = self._whole[name] = HostArray(
                host_tensor(max(size, 0 if whole is None else 2 * whole.tensor.numel()), dtype)
            )
        return whole

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> HostArray:
        """Numbers in a shape."""
        last, part = self._parts.get(name, (None, None))
        if part is None or last != shape:
            part = HostArray(
                self.at_least(name, prod(shape), dtype).tensor[: prod(shape)].reshape(shape)
            )
            self._parts[name] = shape, part
        return part


class Slots:
    """The memory of the launches of an executable: as many parts as there were launches in flight
    at a time, up to `MOST_SLOTS`.
    """

    def __init__(self, in_flight: "deque[CudaTicket]") -> None:
        self._in_flight = in_flight
        self._free: list[Slot] = []
        self._number = 0

    def next(self) -> Slot:
        """Memory that no launch uses any more; where all is in use, the results of the oldest
        launch are read.
        """
        if not self._free:
            if self._number < MOST_SLOTS:
                self._number += 1
                return Slot()
            self._in_flight[0].wait()
        slot = (
            self._free.pop()
        )  # what was used last: the less memory is needed, the fewer launches are in flight
        if slot.mark:
            slot.mark.synchronize()
        return slot

    def give_back(self, slot: Slot, mark: Mark) -> None:
        """The slot is not used behind a mark."""
        slot.mark = mark
        self._free.append(slot)


class CudaTicket:
    """Stands for the results of a launch; those of the launches before it are read first, as their
    order counts.
    """

    def __init__(
        self,
        mark: Mark,
        read: Callable[[], StepResult],
        in_flight: "deque[CudaTicket]",
        runs_on_host: bool,
    ) -> None:
        self._mark, self._read, self._in_flight = mark, read, in_flight
        self._result: StepResult | None = None
        self.runs_on_host = runs_on_host
        """Whether ops of it wait for the host."""
        in_flight.append(self)

    @property
    def ready(self) -> bool:
        return self._result is not None or self._mark.query()

    def wait(self) -> StepResult:
        while self._result is None:
            first = self._in_flight[0]
            first._mark.synchronize()
            self._in_flight.popleft()
            first._result = first._read()
        return self._result
