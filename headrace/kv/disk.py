"""The disk tier of the prefix cache: KV blocks in a folder, which a later process reads again.

A thread copies full blocks out of the KV memory and writes them, in the order in which they were
computed. No step waits for it: a block that is evicted before its turn is copied into a short
queue, or dropped.
"""

import logging
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import accumulate
from math import inf
from threading import Condition, Thread
from time import perf_counter
from typing import NamedTuple

import numpy as np

from headrace.backend import KvBlocks
from headrace.kv.folder import KEY_BYTES, BlockLabel, Bytes, KvFolder
from headrace.program.adapter import Adapter

_MAX_QUEUED_BYTES = 64 << 20
"""Bytes of evicted blocks that wait for the disk."""
_READERS = 4
"""Threads that read one hit: together they keep the queue of a disk busy."""
_FLUSH_SECONDS = 5.0
"""Max seconds at the end for blocks that are not written yet."""
_RETRY_SECONDS = 60.0
"""Seconds after which a disk that was slower than computing is measured again."""
_MAX_READ_SECONDS = 30.0
_SLICE_SECONDS = 0.03
"""Seconds of reading for which a step of other sequences waits."""
_SLICE_BYTES = 4 << 20
"""Bytes of such a read, before the speed of the disk is known."""
_LINGER_SECONDS = 2.0
"""Seconds for which the thread waits for more blocks."""

_log = logging.getLogger("headrace.kv")


class StoredBlock(NamedTuple):
    """A block of one KV group, and its place in its text."""

    label: BlockLabel
    depth: int
    """Blocks before it."""


class _Queued(NamedTuple):
    block: StoredBlock
    content: Bytes


class DiskTier:
    """The blocks of one engine on the disk. Only its own thread and the engine's thread use it."""

    def __init__(
        self,
        folder: KvFolder,
        blocks: KvBlocks,
        block_size: int,
        adapter_digest: Callable[[Adapter], str],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._folder = folder
        self._blocks = blocks
        self._block_size = block_size
        self._adapter_digest = adapter_digest
        self._clock = clock
        self._adapters: dict[str | None, str] = {None: ""}  # digests by scope
        self._row_seconds = inf
        """Seconds per row in the fastest step."""
        self._byte_seconds = 0.0
        """Seconds per byte of the last hit."""
        self._measured = -inf
        self.num_saved = 0
        self.num_loaded = 0
        self.num_dropped = 0

        self._loads: dict[tuple[int, int], Bytes] = {}  # by group and block
        self._changed = Condition()
        # The rest is for a holder of the lock.
        self._pending = OrderedDict[tuple[int, int], StoredBlock]()  # by group and block
        self._queue = deque[_Queued]()
        self._num_queued_bytes = 0
        self._used = deque[list[bytes]]()
        """Keys of the blocks of hits, whose time of use is to be noted."""
        self._copied: tuple[int, int] | None = None
        """Group and block that the thread copies now."""
        self._writes = False
        self._is_closing = False
        self._readers = ThreadPoolExecutor(_READERS, "kv-cache-read")
        self._is_scanned = False
        self._thread: Thread | None = None
        with self._changed:
            self._wake()

    @property
    def num_bytes(self) -> int:
        """Bytes of the folder."""
        return self._folder.num_bytes

    def record(self, rows: int, seconds: float) -> None:
        self._row_seconds = min(self._row_seconds, seconds / rows)

    @property
    def is_faster(self) -> bool:
        """Whether reading a block is faster than computing it, as far as this run has measured."""
        seconds = self._byte_seconds * sum(self._blocks.block_bytes)
        return (
            seconds < self._block_size * self._row_seconds
            or self._clock() - self._measured > _RETRY_SECONDS
        )

    # Keys

    def add_adapter(self, scope: str, adapter: Adapter) -> None:
        """Say which numbers the adapter of a scope has."""
        self._adapters[scope] = self._adapter_digest(adapter)

    def root_key(self, salt: str | None, adapter: str | None) -> bytes:
        """The key before the first block of texts with a cache salt and the scope of an adapter."""
        text = repr((salt, self._adapters[adapter])).encode("utf-8", "surrogatepass")
        return self._hash(b"scope" + text)

    def next_key(self, parent: bytes, tokens: bytes) -> bytes:
        return self._hash(parent + tokens)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=KEY_BYTES, key=self._folder.secret).digest()

    def has(self, key: bytes, group: int) -> bool:
        return self._folder.has(key, group)

    # Writing

    def save(self, group: int, block: int, stored: StoredBlock) -> None:
        """Write a full block soon, unless a file has it."""
        if self._folder.is_read_only or self._folder.has(stored.label.key, group):
            return
        with self._changed:
            self._pending[group, block] = stored
            self._wake()

    def release(self, group: int, block: int) -> None:
        """Copy a block that is not written yet, before it is overwritten."""
        self._loads.pop((group, block), None)
        with self._changed:
            while self._copied == (group, block):
                self._changed.wait()
            stored = self._pending.pop((group, block), None)
            if stored is None:
                return
            num_bytes = self._blocks.block_bytes[group]
            if self._num_queued_bytes + num_bytes > _MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            content = np.empty(num_bytes, np.uint8)
            self._blocks.read(group, block, content)
            self._queue.append(_Queued(stored, content))
            self._num_queued_bytes += num_bytes
            self._wake()

    def use(self, keys: list[bytes]) -> None:
        """Note that the blocks of a hit were used, the first block first."""
        with self._changed:
            if len(self._used) < 1024:
                self._used.append(keys)
            self._wake()

    # Reading

    def num_of_slice(self, groups: Sequence[int]) -> int:
        """How many of these blocks to read while other sequences wait, given the group of each."""
        num_bytes = _SLICE_BYTES
        if 0 < self._byte_seconds < inf:
            num_bytes = int(_SLICE_SECONDS / self._byte_seconds)
        ends = list(accumulate(self._blocks.block_bytes[group] for group in groups))
        return min(len(ends), max(1, bisect_right(ends, num_bytes)))

    def read(self, labels: Sequence[BlockLabel]) -> list[Bytes] | None:
        """Read blocks; None if one is not there whole, or if computing them would be faster."""
        num_bytes = [self._blocks.block_bytes[label.group] for label in labels]
        started = self._clock()
        limit = min(
            _MAX_READ_SECONDS,
            self._row_seconds * self._block_size * sum(num_bytes) / sum(self._blocks.block_bytes),
        )

        def read(label: BlockLabel, size: int) -> Bytes | None:
            if self._clock() - started > limit:
                return None
            return self._folder.read(label, size)

        contents = list(self._readers.map(read, labels, num_bytes))
        seconds = self._clock() - started
        found = [content for content in contents if content is not None]
        total = sum(content.nbytes for content in found)
        if total:
            self._byte_seconds, self._measured = seconds / total, self._clock()
        if seconds > limit:
            self._byte_seconds, self._measured = inf, self._clock()
            _log.info("the disk of the KV cache is slower than computing: %.2f s", seconds)
        return found if len(found) == len(labels) else None

    def queue_load(self, group: int, block: int, content: Bytes) -> None:
        self._loads[group, block] = content

    def is_loading(self, group: int, block: int) -> bool:
        return (group, block) in self._loads

    def run_loads(self) -> None:
        """Fill the blocks of the queued loads, before the next launch."""
        for (group, block), content in self._loads.items():
            self._blocks.write(group, block, content)
        self.num_loaded += len(self._loads)
        self._loads.clear()

    # The thread

    def _wake(self) -> None:
        """Let the thread look for work; the caller holds the lock."""
        if self._thread:
            self._changed.notify_all()
        elif not self._is_closing and not self._folder.is_read_only:
            self._thread = Thread(target=self._run, name="kv-cache-write", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._write_blocks()
        except Exception:
            _log.exception("the KV cache writes no more blocks until a restart")
            self._folder.is_read_only = True
            with self._changed:  # the engine's thread may wait
                self._copied = self._thread = None
                self._pending.clear()
                self._changed.notify_all()

    def _write_blocks(self) -> None:
        """Write until there is nothing to write for a while: a tier that is dropped without a
        `close` must not keep the memory of its engine.
        """
        if not self._is_scanned:
            self._folder.scan()
            self._is_scanned = True
        buffers = [np.empty(size, np.uint8) for size in self._blocks.block_bytes]
        while True:
            with self._changed:
                self._writes = False
                if not (self._is_busy or self._is_closing):
                    self._changed.notify_all()
                    self._changed.wait(_LINGER_SECONDS)
                if not self._is_busy:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._writes = True
                used = self._used.popleft() if self._used else None
                queued = self._queue.popleft() if self._queue else None
                if queued:
                    self._num_queued_bytes -= queued.content.nbytes
                elif self._pending:
                    self._copied, stored = self._pending.popitem(last=False)
            if used:
                self._folder.touch(used, len(buffers))
            if queued:
                self._write(queued)
            elif self._copied:
                group, block = self._copied
                self._blocks.read(group, block, buffers[group])
                with self._changed:
                    self._copied = None
                    self._changed.notify_all()
                self._write(_Queued(stored, buffers[group]))

    def _write(self, queued: _Queued) -> None:
        label, depth = queued.block
        if self._folder.has(label.key, label.group):
            return
        if self._folder.write(label, depth, queued.content):
            self.num_saved += 1
        else:
            self.num_dropped += 1

    # Ends

    def reset(self) -> None:
        """Forget the blocks of the KV memory, which no longer counts after a failed step."""
        self._loads.clear()
        with self._changed:
            while self._copied:
                self._changed.wait()
            self._pending.clear()

    def flush(self, seconds: float) -> None:
        """Wait until all saved blocks are written, for some seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy, seconds)

    @property
    def _is_busy(self) -> bool:
        return bool(self._thread and (self._pending or self._queue or self._used or self._writes))

    def close(self) -> None:
        """Write what is left, for a few seconds at most, and end the threads."""
        self._loads.clear()
        self.flush(_FLUSH_SECONDS)
        with self._changed:
            self._is_closing = True
            thread = self._thread
            self._changed.notify_all()
            self.num_dropped += len(self._pending) + len(self._queue)
            self._pending.clear()
            self._queue.clear()
        if thread:
            thread.join()
        self._readers.shutdown()
