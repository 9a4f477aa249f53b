"""A drafter on the device: its chains run from depth to depth without a wait of the host.

The taps of the target, the drafter's own rows and the drawn tokens stay on the device. So the
host queues all depths of a chain and reads the drafts once.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from headrace.backend.cuda.kept_rows import KeptRow, RowStore
from headrace.backend.cuda.ticket import CudaTicket, Slot
from headrace.batch import RaggedBatch
from headrace.logit_ops import LogitOp

if TYPE_CHECKING:
    from headrace.backend.cuda.executable import CudaExecutable


class CudaDrafter:
    """Programs of a drafter with one sampler and one order of launches. See `DeviceDrafter`."""

    def __init__(
        self, from_target: "CudaExecutable", from_itself: "CudaExecutable", taps: RowStore
    ) -> None:
        self._from_target, self._from_itself, self._taps = from_target, from_itself, taps
        self._hidden: torch.Tensor | None = None
        """[rows, width] of the last launch."""

    def start(
        self, batch: RaggedBatch, ops: Sequence[LogitOp], rows: Sequence[object]
    ) -> CudaTicket:
        def read(out: torch.Tensor, slot: Slot) -> None:
            self._taps.read(out, cast(Sequence[KeptRow], rows), slot)

        return self._launch(self._from_target, batch, ops, read)

    def follow(
        self, batch: RaggedBatch, ops: Sequence[LogitOp], last_rows: Sequence[int]
    ) -> CudaTicket:
        hidden = self._hidden
        assert hidden is not None, "a chain starts with rows of the target"

        def read(out: torch.Tensor, slot: Slot) -> None:
            self._from_itself.copy_rows(out, hidden, last_rows)

        return self._launch(self._from_itself, batch, ops, read)

    def _launch(
        self,
        executable: "CudaExecutable",
        batch: RaggedBatch,
        ops: Sequence[LogitOp],
        inputs: Callable[[torch.Tensor, Slot], None],
    ) -> CudaTicket:
        ticket = executable.launch(batch, ops, inputs=inputs)
        self._hidden = executable.hidden_rows(batch)
        return ticket
