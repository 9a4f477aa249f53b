"""Rows of each expert, counted on the device and read without waiting for it."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend import expert_table
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.stream import Mark, Stream, host_tensor
from headrace.program import moe


class ExpertLoads:
    """Counts of one program, which its launches add to."""

    def __init__(self, ops: Sequence[moe.Experts], stream: Stream) -> None:
        self._sizes, self._stream = [len(op.gate) for op in ops], stream
        width = max(self._sizes, default=0)
        self._counts = torch.zeros(len(ops), width, dtype=torch.int64, device=DEVICE)
        self.of_op = {
            op.out.id: row[:size]
            for op, row, size in zip(ops, self._counts, self._sizes, strict=True)
        }
        self._mark: Mark | None = None
        self._table = expert_table([[0] * size for size in self._sizes])

    def table(self, is_idle: bool) -> NDArray[np.int64]:
        """Return the counts; unless `is_idle`, of steps before the last reads of the table.

        A report in the middle of a step must not wait for the device.
        """
        if not self._sizes:
            return self._table
        if self._mark is None or is_idle:
            self._copy()
        assert self._mark
        if is_idle:
            self._mark.synchronize()
        if self._mark.query():
            counts = self._host.tolist()
            self._table = expert_table(
                [row[:size] for row, size in zip(counts, self._sizes, strict=True)]
            )
            self._copy()
        return self._table

    @cached_property
    def _host(self) -> torch.Tensor:
        return host_tensor(self._counts.numel(), torch.int64).view(self._counts.shape)

    def _copy(self) -> None:
        self._stream.copy(self._host, self._counts)
        self._mark = self._stream.mark()
