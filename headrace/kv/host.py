"""The host tier of the prefix cache: copies of blocks in the host's memory, of what the pools have
no place for any more.

It holds numbers, as pools do; the storage is the backend's (`HostBlocks`). The copy of a block is
made when the block is evicted, and copied back into another block for a sequence that wants it
again. It stays when it was copied back, so that what is evicted again needs no second copy. Where
no host block is left, the copy that was made or wanted least recently goes.

All copies are made in the order in which launches are, so no one waits for them. A copy to the host
is made at once: nothing that is still to come writes a block of the prefix cache. A copy back waits
until the step's own copies have been made (`load_blocks`), because these may read what its block
held before; until then no other copy takes its place in the host's memory.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from headrace.backend import HostBlocks
from headrace.kv.blocks import NULL_BLOCK

_log = logging.getLogger("headrace.kv")


class Load(NamedTuple):
    """A block that is to be copied back."""

    group: int
    host_block: int
    block: int


class HostTier:
    """The host blocks of each group; none at all without a `store`.

    Blocks go there and come back only while that is quicker than to compute them: while a block of
    every group comes back in less time than the quickest step so far took for as many rows as a
    block has tokens.
    """

    def __init__(self, store: HostBlocks | None = None, block_size: int = 0) -> None:
        self._store = store
        self._block_size = block_size
        self._row_seconds = inf
        """Of a row in the quickest step; not known before the first."""
        self.num_saved = 0
        """Blocks that were copied to the host."""
        self.num_loaded = 0
        """Blocks that were copied back."""
        self.restart()

    def restart(self) -> None:
        """Believe no copy any more."""
        num_blocks = self._store.num_blocks if self._store else ()
        self._unused = [list(range(num - 1, -1, -1)) for num in num_blocks]  # the lowest last
        self._kept = [
            OrderedDict[int, Callable[[int], None]]() for _ in num_blocks
        ]  # what to call when one goes; the oldest first
        self._loads: list[Load] = []
        self._wanted = [set[int]() for _ in num_blocks]
        """Host blocks that will be copied back."""

    def close(self) -> None:
        """Give the memory back."""
        self._store = None
        self.restart()

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step, which took so long at most."""
        self._row_seconds = min(self._row_seconds, seconds / rows)

    @property
    def is_quicker(self) -> bool:
        """Whether there is a tier, and blocks come back in less time than it takes to compute
        them.
        """
        return (
            self._store is not None
            and self._store.block_seconds < self._block_size * self._row_seconds
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return (
            sum(
                len(kept) * size
                for kept, size in zip(self._kept, self._store.block_bytes, strict=True)
            )
            if self._store
            else 0
        )

    def save(self, group: int, block: int, forget: Callable[[int], None]) -> int:
        """Copy a block that is about to be written anew; returns its host block, for which `forget`
        is called when it goes.

        `NULL_BLOCK` where it would be quicker to compute it again, or there is no host block for
        it.
        """
        if self._store is None or not self.is_quicker:
            return NULL_BLOCK
        unused, kept = self._unused[group], self._kept[group]
        if not unused:
            oldest = next(iter(kept), NULL_BLOCK)
            if oldest == NULL_BLOCK or oldest in self._wanted[group]:
                return NULL_BLOCK
            kept.pop(oldest)(oldest)
            unused.append(oldest)
        host_block = unused.pop()
        try:
            self._store.save(group, block, host_block)
        except MemoryError:
            _log.warning(
                "the host has memory for %d blocks of KV and no more: the engine goes on with these",
                len(kept),
            )
            unused.clear()
            return NULL_BLOCK
        kept[host_block] = forget
        self.num_saved += 1
        return host_block

    def touch(self, group: int, host_block: int) -> None:
        """The block of a copy was used."""
        self._kept[group].move_to_end(host_block)

    def let_go(self, group: int, host_block: int) -> None:
        """Keep a copy no longer."""
        del self._kept[group][host_block]
        self._unused[group].append(host_block)

    def want(self, group: int, host_block: int) -> None:
        """Keep a copy at least until it has been copied back."""
        self._wanted[group].add(host_block)
        self.touch(group, host_block)

    def load(self, group: int, host_block: int, block: int) -> None:
        """Let a wanted copy be copied back into a block by the next `load_blocks`."""
        self._loads.append(Load(group, host_block, block))

    def load_blocks(self) -> None:
        """Copy back what is to be copied back before the next launch."""
        if not self._loads:
            return
        assert self._store is not None, "a copy of nothing is to be copied back"
        for load in self._loads:
            self._store.load(*load)
        self.num_loaded += len(self._loads)
        self._loads.clear()
        for wanted in self._wanted:
            wanted.clear()

    def check(self) -> None:
        """Assert that every host block is in one place, and that copies which are to be copied back
        are there.
        """
        for group, (unused, kept) in enumerate(zip(self._unused, self._kept, strict=True)):
            assert len(set(unused)) == len(unused) and not kept.keys() & set(unused)
            assert self._wanted[group] <= kept.keys()
        assert all(load.host_block in self._wanted[load.group] for load in self._loads)
