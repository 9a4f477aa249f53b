"""The host tier of the prefix cache: copies of evicted blocks in host memory (`HostBlocks`).

Copies run in the order of the launches. A load waits for the step's block copies, which may read
its target; until then its host block is pinned.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from headrace.backend import HostBlocks
from headrace.kv.blocks import NULL_BLOCK

_log = logging.getLogger("headrace.kv")


class QueuedLoad(NamedTuple):
    group: int
    host_block: int
    block: int


class HostTier:
    """The host blocks of each KV group; empty without a `store`.

    A copy stays after it is loaded. The least recently used is dropped first.
    """

    def __init__(self, store: HostBlocks | None = None, block_size: int = 0) -> None:
        self._store = store
        self._block_size = block_size
        self._row_seconds = inf
        """Seconds per row in the fastest step."""
        self.num_saved = 0
        self.num_loaded = 0
        self.reset()

    def reset(self) -> None:
        num_blocks = self._store.num_blocks if self._store else ()
        self._free = [list(range(num - 1, -1, -1)) for num in num_blocks]  # the lowest last
        # Used host blocks of each group, least recently used first; the value is called on a drop.
        self._used = [OrderedDict[int, Callable[[int], None]]() for _ in num_blocks]
        self._pinned = [set[int]() for _ in num_blocks]
        self._queue: list[QueuedLoad] = []

    def close(self) -> None:
        self._store = None
        self.reset()

    def record(self, rows: int, seconds: float) -> None:
        self._row_seconds = min(self._row_seconds, seconds / rows)

    @property
    def is_faster(self) -> bool:
        """Whether loading a block of every group is faster than computing it."""
        return (
            self._store is not None
            and self._store.block_seconds < self._block_size * self._row_seconds
        )

    @property
    def num_bytes(self) -> int:
        if self._store is None:
            return 0
        return sum(
            len(used) * block_bytes
            for used, block_bytes in zip(self._used, self._store.block_bytes, strict=True)
        )

    def save(self, group: int, block: int, on_drop: Callable[[int], None]) -> int:
        """Copy a block before it is overwritten, and return its host block.

        `on_drop(host_block)` reports a dropped copy. Returns `NULL_BLOCK` if computing is faster,
        or without a host block.
        """
        if self._store is None or not self.is_faster:
            return NULL_BLOCK
        free, used = self._free[group], self._used[group]
        if not free:
            oldest = next(iter(used), NULL_BLOCK)
            if oldest == NULL_BLOCK or oldest in self._pinned[group]:
                return NULL_BLOCK
            used.pop(oldest)(oldest)
            free.append(oldest)

        host_block = free.pop()
        try:
            self._store.save(group, block, host_block)
        except MemoryError:
            _log.warning("host memory is full: the KV cache keeps %d blocks there", len(used))
            free.clear()
            return NULL_BLOCK
        used[host_block] = on_drop
        self.num_saved += 1
        return host_block

    def touch(self, group: int, host_block: int) -> None:
        self._used[group].move_to_end(host_block)

    def free(self, group: int, host_block: int) -> None:
        del self._used[group][host_block]
        self._free[group].append(host_block)

    def pin(self, group: int, host_block: int) -> None:
        self._pinned[group].add(host_block)
        self.touch(group, host_block)

    def queue_load(self, group: int, host_block: int, block: int) -> None:
        self._queue.append(QueuedLoad(group, host_block, block))

    def is_loading(self, group: int, block: int) -> bool:
        return any((load.group, load.block) == (group, block) for load in self._queue)

    def run_loads(self) -> None:
        """Issue the queued loads, before the next launch."""
        if not self._queue:
            return
        assert self._store is not None, "a load needs a store"
        for load in self._queue:
            self._store.load(load.group, load.host_block, load.block)
        self.num_loaded += len(self._queue)
        self._queue.clear()
        for pinned in self._pinned:
            pinned.clear()

    def check(self) -> None:
        for group, (free, used) in enumerate(zip(self._free, self._used, strict=True)):
            assert len(set(free)) == len(free) and not used.keys() & set(free)
            assert self._pinned[group] <= used.keys()
        assert all(load.host_block in self._pinned[load.group] for load in self._queue)
