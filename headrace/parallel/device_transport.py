"""Transport of tensors in GPU memory over NCCL; over gloo if kernels are interpreted."""

import os
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.parallel.mesh import Mesh
from headrace.parallel.process_groups import TIMEOUT_SECONDS, ProcessGroups, rank_lost_errors

_NCCL_OPTIONS = {
    # A rank may capture a step in a graph that another launches kernel by kernel. So nothing in a
    # capture may need the other ranks: no connection, and no registration of memory.
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_GRAPH_REGISTER": "0",
    # Rank 0 watches the others, and no thread of torch ends this process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class DeviceTransport(ProcessGroups):
    """The `Transport` of the cuda backend.

    On a GPU a call only queues its work in the stream, so a lost rank leaves the stream waiting
    until `interrupt`.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        if not is_interpreting():
            self.max_step_seconds = TIMEOUT_SECONDS
        for name, value in _NCCL_OPTIONS.items():
            os.environ.setdefault(name, value)

    def _open(self, store: Any, rank: int, size: int) -> Any:
        if is_interpreting():
            return super()._open(store, rank, size)
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
        return nccl(store, rank, size, options)

    def open_groups(self, store: Any) -> tuple[Any, Any]:
        groups = super().open_groups(store)
        opened = copy(self)
        opened.connect(groups)
        opened._exchange_once()
        return groups

    def _exchange_once(self) -> None:
        """Connect all ranks. NCCL does so at the first use, and then the host waits for the others,
        which it must not do in the capture of a graph.
        """
        numbers = torch.zeros(self._mesh.tensor, device="cpu" if is_interpreting() else "cuda")
        ones = [1] * self._mesh.tensor
        self.all_gather(numbers, numbers[:1].clone())
        self.all_to_all(numbers, numbers.clone(), ones, ones)
        self.broadcast(numbers)
        if self._stage > 0:
            self.receive(numbers, self._stage - 1)
        if self._stage < self._mesh.pipeline - 1:
            self.send(numbers, self._stage + 1)

    def disconnect(self) -> None:
        self.interrupt()
        super().disconnect()

    def interrupt(self) -> None:
        for group in (self._all_ranks, self._stage_ranks):
            if group is not None and not is_interpreting():
                with suppress(RuntimeError):  # the group has already ended with an error
                    group.abort()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.asyncOp = False  # in this stream, without another one
        with rank_lost_errors():
            self._stage_ranks._allgather_base(_bytes(out), _bytes(x), options).wait()

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        options = AllToAllOptions()
        options.asyncOp = False
        with rank_lost_errors():
            self._stage_ranks.alltoall_base(out, x, list(received), list(sent), options).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        with rank_lost_errors():
            self._stage_ranks.broadcast([_bytes(x)], options).wait()

    def send(self, x: torch.Tensor, stage: int) -> None:
        with rank_lost_errors():
            self._all_ranks.send([x], self._mesh.rank(stage, self.share), 0).wait()

    def receive(self, out: torch.Tensor, stage: int) -> None:
        with rank_lost_errors():
            self._all_ranks.recv([out], self._mesh.rank(stage, self.share), 0).wait()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A flat view of numbers of any type, which every transport can carry."""
    return x.reshape(-1).view(torch.uint8)
