"""Process groups of a rank (`torch.distributed`): all ranks, and the ranks of its stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo

from headrace.errors import RankLostError
from headrace.parallel.mesh import Mesh

TIMEOUT_SECONDS = 300.0
"""Seconds of an exchange."""


class ProcessGroups:
    """Private groups, since torch has a single default group per process."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self.share, self._stage = mesh.share(rank), mesh.stage(rank)
        self.max_step_seconds = inf
        """Seconds of a step's exchanges, unless each of them ends with an error by itself."""
        self._all_ranks: Any = None
        self._stage_ranks: Any = None

    def open_groups(self, store: Any) -> tuple[Any, Any]:
        """Wait for the other ranks. Raises RankLostError."""
        mesh = self._mesh
        with rank_lost_errors():
            all_ranks = self._open(PrefixStore("all", store), self._rank, mesh.ranks)
            stage_store = PrefixStore(f"stage {self._stage}", store)
            return all_ranks, self._open(stage_store, self.share, mesh.tensor)

    def _open(self, store: Any, rank: int, size: int) -> Any:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_SECONDS))

    @property
    def is_connected(self) -> bool:
        return self._all_ranks is not None

    def connect(self, groups: tuple[Any, Any]) -> None:
        self._all_ranks, self._stage_ranks = groups

    def disconnect(self) -> None:
        """End all exchanges, in the other ranks with an error."""
        self._all_ranks = self._stage_ranks = None

    def interrupt(self) -> None:
        """End the exchanges that this rank waits for. Another thread may call this."""


@contextmanager
def rank_lost_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # The message begins with "[file:line] ", and may have more sentences.
        first_line = str(error).splitlines()[0]
        reason = first_line.partition("] ")[2].partition(". ")[0]
        raise RankLostError(f"a rank does not respond: {reason or error}") from None
