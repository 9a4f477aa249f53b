"""Rows between processes, over the gloo backend of `torch.distributed`."""

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

_SECONDS = 300.0
"""After which an exchange fails even where no rank was found to be lost."""
_MOST_SENT = 8
"""Rows that have been sent and need not have been received yet."""


class GlooCarrier:
    """The links of one rank. They are there from `connect` to `disconnect`, and may be made
    anew.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._share, self._stage = rank % mesh.tensor, mesh.stage(rank)
        self._all: Any = (
            None  # the groups are our own: the default one of torch is there once in a process
        )
        self._group: Any = None
        self._sent: deque[tuple[Any, Any]] = deque()
        self.received = 0
        """Bytes that have come from other ranks."""

    def groups(self, store: Any) -> tuple[Any, Any]:
        """The process groups of all ranks and of this one's stage, which a store brings together:
        all must come for them.

        Raises RankLostError where one does not.
        """
        with _lost():
            timeout = timedelta(seconds=_SECONDS)
            everyone = ProcessGroupGloo(
                PrefixStore("all", store), self._rank, self._mesh.ranks, timeout
            )
            return everyone, ProcessGroupGloo(
                PrefixStore(f"stage {self._stage}", store), self._share, self._mesh.tensor, timeout
            )

    def connect(self, groups: tuple[Any, Any]) -> None:
        """Use these groups from now on."""
        self._all, self._group = groups

    def disconnect(self) -> None:
        """Leave the process group, which has others or not."""
        self._sent.clear()
        self._all = self._group = None

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        padded = np.zeros(max(sizes), np.float32)  # gloo gathers what is equally long
        padded[: len(numbers)] = numbers
        found = [torch.empty(len(padded)) for _ in sizes]
        if len(padded):
            with _lost():
                self._group.allgather([found], [torch.from_numpy(padded)]).wait()
        self.received += 4 * (sum(sizes) - sizes[self._share])
        return [one.numpy()[:size] for one, size in zip(found, sizes, strict=True)]

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        out = torch.empty(sum(sizes))
        with _lost():
            whole = torch.from_numpy(np.concatenate(pieces))
            self._group.alltoall_base(
                out, whole, list(sizes), [len(piece) for piece in pieces]
            ).wait()
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
            self._sent.append((self._all.send([copy], rank, 0), copy))

    def receive_from(self, out: Floats, rank: int) -> None:
        """What that rank sends."""
        with _lost():
            self._all.recv([torch.from_numpy(out)], rank, 0).wait()
        self.received += out.nbytes


@contextmanager
def _lost() -> Iterator[None]:
    """What gloo says of a rank that does not answer, as an error of our own."""
    try:
        yield
    except RuntimeError as error:
        reason = (
            str(error).splitlines()[0].partition("] ")[2].partition(". ")[0]
        )  # behind a line of gloo's sources
        raise RankLostError(f"a rank does not answer: {reason or error}") from None
