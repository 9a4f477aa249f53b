"""The block pool: who owns which block of KV slots. It holds numbers only; the storage belongs to the backend.

A block is in the tables of one sequence or, after a fork or a prefix hit, of several; it is free again when the last of them
releases it. A shared block is never written: a sequence that must write gets a copy of its own first.

A free block is either empty or evictable: the content of an evictable block is kept for a sequence that wants it again, until no
empty block is left. Then the least recently used evictable blocks are evicted, as many as make a run.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence
from typing import NamedTuple

Table = MutableSequence[int]
"""The blocks of a sequence in position order, `NULL_BLOCK` for those at the beginning that it released before its end."""

NULL_BLOCK = -1

_GROUP = 8
"""Blocks whose numbers share a quotient by this are contiguous in memory, in ascending order."""


def slots(table: Table, first: int, end: int, block_size: int) -> list[int]:
    """The slots of tokens `first` to `end - 1` of a sequence."""
    return [table[index // block_size] * block_size + index % block_size for index in range(first, end)]


class BlockCopy(NamedTuple):
    """Slots of block `source` are to be copied to block `target` before the next step writes anything."""

    source: int
    target: int


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, with reference counts. A sequence's table lists its blocks in position order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._kept: dict[int, Callable[[int], None]] = {}  # blocks that become evictable, and what to call when they are evicted
        self._evictable = OrderedDict[int, None]()  # least recently used first
        self._num_empty = num_blocks
        groups = range(-(-num_blocks // _GROUP))
        self._empty_in_group = [min(_GROUP, num_blocks - group * _GROUP) for group in groups]
        self._whole = set(groups)  # groups of empty blocks only
        self._part = set[int]()  # groups with empty blocks and others

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, empty and evictable."""
        return self._num_empty + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Blocks in no table whose content is kept."""
        return len(self._evictable)

    def evictable_blocks(self) -> list[int]:
        """Blocks in no table whose content is kept, the least recently used first."""
        return list(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def slot(self, table: Table, index: int) -> int:
        """The slot of the `index`-th token of a sequence."""
        return table[index // self.block_size] * self.block_size + index % self.block_size

    def slots(self, table: Table, first: int, end: int) -> list[int]:
        """The slots of tokens `first` to `end - 1` of a sequence."""
        return slots(table, first, end, self.block_size)

    def slots_of(self, copies: list[BlockCopy]) -> list[tuple[int, int]]:
        """The same copies slot by slot: (source, target)."""
        return [(c.source * self.block_size + i, c.target * self.block_size + i) for c in copies for i in range(self.block_size)]

    def reserve(self, table: Table, computed: int, length: int) -> list[BlockCopy] | None:
        """Make slots `computed` to `computed + length - 1` of the table writable: there, and in no other table.

        Extends the table and replaces shared blocks; returns the copies to make, or None, with nothing changed, when there
        are not enough free blocks.
        """
        needed = self.blocks_for(computed + length)
        shared = [i for i in range(computed // self.block_size, min(needed, len(table))) if self._references[table[i]] > 1]
        copies: list[BlockCopy] = []
        if needed <= len(table) and not shared:  # so it is most of the time
            return copies
        if max(0, needed - len(table)) + len(shared) > self.num_free:
            return None
        for i in shared:
            source, table[i] = table[i], self._take(table[i - 1] if i else None)
            self._release(source)
            copies.append(BlockCopy(source, table[i]))
        while len(table) < needed:
            table.append(self._take(table[-1] if table else None))
        return copies

    def keep(self, table: Table, end: int, path: list[int]) -> list[tuple[int, int]]:
        """Keep the first `end` slots and, right after them, those that were `path[i]` beyond; release the rest.

        Returns the slots to move, (source, target), before anything else is written.
        """
        moves = [(self.slot(table, end + node), self.slot(table, end + i)) for i, node in enumerate(path) if node != i]
        self.trim(table, end + len(path))
        return moves

    def fork(self, table: Table) -> Table:
        """A second table of the same blocks."""
        for block in table:
            if block != NULL_BLOCK:
                self._references[block] += 1
        return table[:]

    def retain(self, block: int, forget: Callable[[int], None]) -> None:
        """Keep the content of a held block when it is released; `forget(block)` is called when it is evicted."""
        self._kept[block] = forget

    def share(self, table: Table, blocks: Iterable[int]) -> None:
        """Append blocks whose content is kept, held by others or evictable."""
        for block in blocks:
            self._hold(block)
            table.append(block)

    def exchange(self, table: Table, index: int, block: int) -> None:
        """Release a block in favour of one with the same content, held by others or evictable."""
        self._hold(block)
        self._release(table[index])
        table[index] = block

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are in a table."""
        return sum(self._references[block] > 0 for block in blocks)

    def trim(self, table: Table, computed: int) -> None:
        """Release the blocks beyond the first `computed` slots, the last first."""
        while len(table) > self.blocks_for(computed):
            if (block := table.pop()) != NULL_BLOCK:
                self._release(block)

    def release_outside_window(self, table: Table, first: int) -> None:
        """Release the blocks before slot `first`, which no row will see any more."""
        index = first // self.block_size - 1
        while index >= 0 and table[index] != NULL_BLOCK:
            self._release(table[index])
            table[index] = NULL_BLOCK
            index -= 1

    def free(self, table: Table) -> None:
        """Release all blocks."""
        self.trim(table, 0)

    def check(self, tables: list[Table]) -> None:
        """Assert that the pool and these tables, which are all there are, agree on every block."""
        held = [0] * self.num_blocks
        for table in tables:
            blocks = table[table.count(NULL_BLOCK) :]
            assert len(set(blocks)) == len(blocks) and NULL_BLOCK not in blocks, (
                f"a block is twice in {table}, or a null block not at its start"
            )
            for block in blocks:
                held[block] += 1
        assert held == self._references
        assert self.num_free == held.count(0)
        assert self._evictable.keys() == {block for block in self._kept if not held[block]}
        assert self._num_empty == sum(self._empty_in_group)

    def _take(self, previous: int | None) -> int:
        """A free block: the one after `previous` if it is empty, else one that starts a run, else any."""
        if not self._num_empty:
            self._evict()
        if previous is not None and previous + 1 < self.num_blocks and self._is_empty(previous + 1):
            block = previous + 1
        elif self._whole:
            block = next(iter(self._whole)) * _GROUP
        else:
            first = next(iter(self._part)) * _GROUP
            block = next(block for block in range(first, first + _GROUP) if self._is_empty(block))
        self._references[block] = 1
        self._count_empty(block // _GROUP, -1)
        return block

    def _evict(self) -> None:
        """Blocks are released from the end of a table to its start, so a group of them is often a run."""
        for _ in range(min(_GROUP, len(self._evictable))):
            block, _ = self._evictable.popitem(last=False)
            self._kept.pop(block)(block)
            self._count_empty(block // _GROUP, 1)

    def _is_empty(self, block: int) -> bool:
        return not self._references[block] and block not in self._evictable

    def _hold(self, block: int) -> None:
        self._references[block] += 1
        self._evictable.pop(block, None)

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is free already"
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._kept:
            self._evictable[block] = None
        else:
            self._count_empty(block // _GROUP, 1)

    def _count_empty(self, group: int, change: int) -> None:
        self._num_empty += change
        self._empty_in_group[group] += change
        empty, size = self._empty_in_group[group], min(_GROUP, self.num_blocks - group * _GROUP)
        (self._whole.add if empty == size else self._whole.discard)(group)
        (self._part.add if 0 < empty < size else self._part.discard)(group)
