"""Transport of rows in the host's memory over gloo (`torch.distributed`)."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.parallel.collectives import Floats
from headrace.parallel.mesh import Mesh
from headrace.parallel.process_groups import ProcessGroups, rank_lost_errors

_MAX_PENDING_SENDS = 8


class GlooTransport(ProcessGroups):
    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self._pending_sends: deque[tuple[Any, Any]] = deque()
        self.received_bytes = 0

    def disconnect(self) -> None:
        self._pending_sends.clear()
        super().disconnect()

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        padded = np.zeros(max(sizes), np.float32)  # gloo gathers arrays of equal length
        padded[: len(numbers)] = numbers
        gathered = [torch.empty(len(padded)) for _ in sizes]
        if len(padded):
            with rank_lost_errors():
                self._stage_ranks.allgather([gathered], [torch.from_numpy(padded)]).wait()
        self.received_bytes += 4 * (sum(sizes) - sizes[self.share])
        return [array.numpy()[:size] for array, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        out = torch.empty(sum(sizes))
        sent = torch.from_numpy(np.concatenate(pieces))
        sent_sizes = [len(piece) for piece in pieces]
        with rank_lost_errors():
            self._stage_ranks.alltoall_base(out, sent, list(sizes), sent_sizes).wait()
        self.received_bytes += 4 * (sum(sizes) - sizes[self.share])
        return np.split(out.numpy(), np.cumsum(sizes)[:-1])

    def send(self, rows: Floats, stage: int) -> None:
        with rank_lost_errors():
            while len(self._pending_sends) >= _MAX_PENDING_SENDS:
                self._pending_sends.popleft()[0].wait()
            copy = torch.from_numpy(np.array(rows))
            rank = self._mesh.rank(stage, self.share)
            self._pending_sends.append((self._all_ranks.send([copy], rank, 0), copy))

    def receive(self, out: Floats, stage: int) -> None:
        rank = self._mesh.rank(stage, self.share)
        with rank_lost_errors():
            self._all_ranks.recv([torch.from_numpy(out)], rank, 0).wait()
        self.received_bytes += out.nbytes
