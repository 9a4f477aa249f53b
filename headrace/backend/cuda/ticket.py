"""Results of a launch on their way from the device to the host, and the memory there that they come to."""

from collections import deque
from collections.abc import Callable

import torch

from headrace.backend.cuda.stream import Mark, host_tensor
from headrace.logit_ops import StepResult

SLOTS = 4
"""Launches whose numbers are in the host's memory at a time, on their way to the device or from it."""


class Slot:
    """Memory of the host for the numbers of one launch."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.mark: Mark | None = None
        """Behind the launch that used it last."""
        self.ticket: CudaTicket | None = None
        """Of that launch."""

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The first numbers of a part of the memory, in a shape."""
        size = 1
        for part in shape:
            size *= part
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size:
            tensor = self._tensors[name] = host_tensor(max(size, 0 if tensor is None else 2 * tensor.numel()), dtype)
        return tensor[:size].reshape(shape)


class Slots:
    """The memory of the launches of an executable, used in turn."""

    def __init__(self) -> None:
        self._slots = deque(Slot() for _ in range(SLOTS))

    def next(self) -> Slot:
        """The memory that has not been used for longest, once the launch that did is through and its results are read."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        if slot.mark:
            slot.mark.synchronize()
        if slot.ticket:
            slot.ticket.wait()
            slot.ticket = None
        return slot


class CudaTicket:
    """Stands for the results of a launch; those of the launches before it are read first, as their order counts."""

    def __init__(self, mark: Mark, read: Callable[[], StepResult], in_flight: "deque[CudaTicket]", runs_on_host: bool) -> None:
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
