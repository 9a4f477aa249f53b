"""Rows between processes, over the gloo backend of `torch.distributed`."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from headrace.errors import RankLostError
from headrace.parallel.exchange import Floats
from headrace.parallel.mesh import Mesh

_SECONDS = 300.0
"""After which an exchange fails even where no rank was found to be lost."""
_MOST_SENT = 8
"""Rows that have been sent and need not have been received yet."""


class GlooCarrier:
    """The links of one rank. They are there from `connect` to `disconnect`, and may be made anew."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._share, self._stage = rank % mesh.tensor, mesh.stage(rank)
        self._group: Any = None
        self._sent: deque[tuple[Any, Any]] = deque()
        self.received = 0
        """Bytes that have come from other ranks."""

    def connect(self, store: Any) -> None:
        """Join the process group of all ranks, which a store brings together. Raises RankLostError where one does not come."""
        hook = sys.excepthook  # torch would put the rank in front of every line of any error
        with _lost():
            timeout = timedelta(seconds=_SECONDS)
            distributed.init_process_group("gloo", store=store, rank=self._rank, world_size=self._mesh.ranks, timeout=timeout)
            groups = [distributed.new_group(self._mesh.group(stage), timeout=timeout) for stage in range(self._mesh.pipeline)]
            self._group = groups[self._stage]
        sys.excepthook = hook

    def disconnect(self) -> None:
        """Leave the process group, which has others or not."""
        self._sent.clear()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        padded = np.zeros(max(sizes), np.float32)  # gloo gathers what is equally long
        padded[: len(numbers)] = numbers
        found = [torch.empty(len(padded)) for _ in sizes]
        if len(padded):
            with _lost():
                distributed.all_gather(found, torch.from_numpy(padded), self._group)
        self.received += 4 * (sum(sizes) - sizes[self._share])
        return [one.numpy()[:size] for one, size in zip(found, sizes, strict=True)]

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        out = torch.empty(sum(sizes))
        with _lost():
            whole = torch.from_numpy(np.concatenate(pieces))
            distributed.all_to_all_single(out, whole, list(sizes), [len(piece) for piece in pieces], group=self._group)
        self.received += 4 * (sum(sizes) - sizes[self._share])
        return np.split(out.numpy(), np.cumsum(sizes)[:-1])

    def send(self, rows: Floats, stage: int) -> None:
        self.send_to(rows, stage * self._mesh.tensor + self._share)

    def receive(self, out: Floats, stage: int) -> None:
        self.receive_from(out, stage * self._mesh.tensor + self._share)

    def send_to(self, rows: Floats, rank: int) -> None:
        """Rows to any rank; they may change afterwards."""
        with _lost():
            while len(self._sent) >= _MOST_SENT:
                self._sent.popleft()[0].wait()
            copy = torch.from_numpy(np.array(rows))
            self._sent.append((distributed.isend(copy, rank), copy))

    def receive_from(self, out: Floats, rank: int) -> None:
        """What that rank sends."""
        with _lost():
            distributed.recv(torch.from_numpy(out), rank)
        self.received += out.nbytes


@contextmanager
def _lost() -> Iterator[None]:
    """What gloo says of a rank that does not answer, as an error of our own."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition("] ")[2].partition(". ")[0]  # behind a line of gloo's sources
        raise RankLostError(f"a rank does not answer: {reason or error}") from None
