"""Tickets of launches in flight, and the host memory of their input and results."""

from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.backend.cuda.memory import device_errors
from headrace.backend.cuda.step_input import StepInput
from headrace.backend.cuda.stream import Mark, host_tensor
from headrace.batch import Ints
from headrace.logit_ops import StepResult

# Max launches with integers in host memory: two steps of multi-step decoding. The
# device runs one step while the host reads the other.
MAX_SLOTS = 40


class HostArray:
    """Host memory that the device copies from and to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.array: NDArray[Any] = tensor.numpy()  # The same memory as `tensor`
        self._step: StepInput | None = None
        self._views: list[Ints] = []

    def views(self, step: StepInput) -> list[Ints]:
        """The fixed parts of a step's input, cached per step shape."""
        if self._step is not step:
            self._step, self._views = step, step.views(self.array)
        return self._views


class Slot:
    def __init__(self) -> None:
        self._whole: dict[str, HostArray] = {}
        self._parts: dict[str, tuple[tuple[int, ...], HostArray]] = {}
        self.mark: Mark | None = None  # Mark after the last launch that used the slot

    def reserve(self, name: str, size: int, dtype: torch.dtype = torch.int32) -> HostArray:
        """An array of at least `size` numbers."""
        array = self._whole.get(name)
        if array is None or array.tensor.numel() < size:
            doubled = 0 if array is None else 2 * array.tensor.numel()
            array = self._whole[name] = HostArray(host_tensor(max(size, doubled), dtype))
        return array

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> HostArray:
        last_shape, part = self._parts.get(name, (None, None))
        if part is None or last_shape != shape:
            size = prod(shape)
            part = HostArray(self.reserve(name, size, dtype).tensor[:size].reshape(shape))
            self._parts[name] = shape, part
        return part


class Slots:
    """Host memory of an executable's launches, at most `MAX_SLOTS` slots."""

    def __init__(self, in_flight: "deque[CudaTicket]") -> None:
        self._in_flight = in_flight
        self._free: list[Slot] = []
        self._number = 0

    def next(self) -> Slot:
        """A free slot. If all are in use, reads the oldest launch first."""
        if not self._free:
            if self._number < MAX_SLOTS:
                self._number += 1
                return Slot()
            self._in_flight[0].wait()

        # The slot used last: the fewer launches are in flight, the less memory is needed.
        slot = self._free.pop()
        if slot.mark:
            slot.mark.synchronize()
        return slot

    def release(self, slot: Slot, mark: Mark) -> None:
        slot.mark = mark
        self._free.append(slot)


class CudaTicket:
    """Results of a launch. The results of earlier launches are read first."""

    def __init__(
        self,
        mark: Mark,
        read: Callable[[], StepResult],
        cancel: Callable[[], None],
        in_flight: "deque[CudaTicket]",
        samples_on_host: bool,
    ) -> None:
        self._mark, self._read, self._in_flight = mark, read, in_flight
        self.cancel = cancel  # Instead of `wait`, if the results have no meaning
        self._result: StepResult | None = None
        self.samples_on_host = samples_on_host  # Whether the host samples some of the tokens
        in_flight.append(self)

    @property
    @device_errors
    def ready(self) -> bool:
        return self._result is not None or self._mark.query()

    @device_errors
    def wait(self) -> StepResult:
        while self._result is None:
            first = self._in_flight[0]
            first._mark.synchronize()
            self._in_flight.popleft()
            first._result = first._read()
        return self._result
