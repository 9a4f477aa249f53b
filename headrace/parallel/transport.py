"""Transport of rows over gloo (`torch.distributed`)."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from headrace.errors import RankLostError
from headrace.parallel.collectives import Floats
from headrace.parallel.mesh import Mesh

_TIMEOUT_SECONDS = 300.0
"""Seconds of an exchange."""
_MAX_PENDING_SENDS = 8


class GlooTransport:
    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._share, self._stage = rank % mesh.tensor, mesh.stage(rank)
        # Private groups, since torch has a single default group per process.
        self._all_ranks: Any = None
        self._stage_ranks: Any = None
        self._pending_sends: deque[tuple[Any, Any]] = deque()
        self.received_bytes = 0

    def open_groups(self, store: Any) -> tuple[Any, Any]:
        """Wait for the other ranks. Raises RankLostError."""
        timeout = timedelta(seconds=_TIMEOUT_SECONDS)
        with _rank_lost_errors():
            all_ranks = ProcessGroupGloo(
                PrefixStore("all", store), self._rank, self._mesh.ranks, timeout
            )
            stage_store = PrefixStore(f"stage {self._stage}", store)
            stage_ranks = ProcessGroupGloo(stage_store, self._share, self._mesh.tensor, timeout)
            return all_ranks, stage_ranks

    @property
    def is_connected(self) -> bool:
        return self._all_ranks is not None

    def connect(self, groups: tuple[Any, Any]) -> None:
        self._all_ranks, self._stage_ranks = groups

    def disconnect(self) -> None:
        self._pending_sends.clear()
        self._all_ranks = self._stage_ranks = None

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        padded = np.zeros(max(sizes), np.float32)  # gloo gathers arrays of equal length
        padded[: len(numbers)] = numbers
        gathered = [torch.empty(len(padded)) for _ in sizes]
        if len(padded):
            with _rank_lost_errors():
                self._stage_ranks.allgather([gathered], [torch.from_numpy(padded)]).wait()
        self.received_bytes += 4 * (sum(sizes) - sizes[self._share])
        return [array.numpy()[:size] for array, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        out = torch.empty(sum(sizes))
        sent = torch.from_numpy(np.concatenate(pieces))
        sent_sizes = [len(piece) for piece in pieces]
        with _rank_lost_errors():
            self._stage_ranks.alltoall_base(out, sent, list(sizes), sent_sizes).wait()
        self.received_bytes += 4 * (sum(sizes) - sizes[self._share])
        return np.split(out.numpy(), np.cumsum(sizes)[:-1])

    def send(self, rows: Floats, stage: int) -> None:
        self.send_to(rows, stage * self._mesh.tensor + self._share)

    def receive(self, out: Floats, stage: int) -> None:
        self.receive_from(out, stage * self._mesh.tensor + self._share)

    def send_to(self, rows: Floats, rank: int) -> None:
        with _rank_lost_errors():
            while len(self._pending_sends) >= _MAX_PENDING_SENDS:
                self._pending_sends.popleft()[0].wait()
            copy = torch.from_numpy(np.array(rows))
            self._pending_sends.append((self._all_ranks.send([copy], rank, 0), copy))

    def receive_from(self, out: Floats, rank: int) -> None:
        with _rank_lost_errors():
            self._all_ranks.recv([torch.from_numpy(out)], rank, 0).wait()
        self.received_bytes += out.nbytes


@contextmanager
def _rank_lost_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # The message begins with "[file:line] ", and may have more sentences.
        first_line = str(error).splitlines()[0]
        reason = first_line.partition("] ")[2].partition(". ")[0]
        raise RankLostError(f"a rank does not respond: {reason or error}") from None
