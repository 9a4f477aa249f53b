"""The block pool: who owns which block of KV slots. It holds numbers only; the storage belongs to the backend.

A block is in the tables of one branch or, after a fork, of several; it is free again when the last of them lets it go. A
shared block is never written: whoever must write gets a copy of its own first.
"""

from collections.abc import MutableSequence
from typing import NamedTuple

Table = MutableSequence[int]
"""The blocks of a branch in position order."""

_GROUP = 8
"""Blocks whose numbers share a quotient by this are contiguous in memory, in ascending order."""


def slots(table: Table, first: int, end: int, block_size: int) -> list[int]:
    """The slots of tokens `first` to `end - 1` of a branch."""
    return [table[index // block_size] * block_size + index % block_size for index in range(first, end)]


class BlockCopy(NamedTuple):
    """Slots of block `source` are to be copied to block `target` before the next step writes anything."""

    source: int
    target: int


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, with reference counts. A branch's table lists its blocks in position order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        groups = range(-(-num_blocks // _GROUP))
        self._free_in_group = [min(_GROUP, num_blocks - group * _GROUP) for group in groups]
        self._whole = set(groups)  # groups without a block in use
        self._part = set[int]()  # groups with free blocks and used ones

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def slot(self, table: Table, index: int) -> int:
        """The slot of the `index`-th token of a branch."""
        return table[index // self.block_size] * self.block_size + index % self.block_size

    def slots(self, table: Table, first: int, end: int) -> list[int]:
        """The slots of tokens `first` to `end - 1` of a branch."""
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
        """Keep the first `end` slots and, right after them, those that were `path[i]` beyond; let go of the rest.

        Returns the slots to move, (source, target), before anything else is written.
        """
        moves = [(self.slot(table, end + node), self.slot(table, end + i)) for i, node in enumerate(path) if node != i]
        self.trim(table, end + len(path))
        return moves

    def fork(self, table: Table) -> Table:
        """A second table of the same blocks."""
        for block in table:
            self._references[block] += 1
        return table[:]

    def trim(self, table: Table, computed: int) -> None:
        """Let go of the blocks beyond the first `computed` slots."""
        while len(table) > self.blocks_for(computed):
            self._release(table.pop())

    def free(self, table: Table) -> None:
        """Let go of all blocks."""
        self.trim(table, 0)

    def check(self, tables: list[Table]) -> None:
        """Assert that the pool and these tables, which are all there are, agree on every block."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block is twice in {table}"
            for block in table:
                held[block] += 1
        assert held == self._references
        assert self.num_free == held.count(0) == sum(self._free_in_group)

    def _take(self, previous: int | None) -> int:
        """A free block: the one after `previous` if it can be, else one that starts a run, else any."""
        if previous is not None and previous + 1 < self.num_blocks and not self._references[previous + 1]:
            block = previous + 1
        elif self._whole:
            block = next(iter(self._whole)) * _GROUP
        else:
            first = next(iter(self._part)) * _GROUP
            block = next(block for block in range(first, first + _GROUP) if not self._references[block])
        self._references[block] = 1
        self._count_free(block // _GROUP, -1)
        return block

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is free already"
        self._references[block] -= 1
        if not self._references[block]:
            self._count_free(block // _GROUP, 1)

    def _count_free(self, group: int, change: int) -> None:
        self.num_free += change
        self._free_in_group[group] += change
        free, size = self._free_in_group[group], min(_GROUP, self.num_blocks - group * _GROUP)
        (self._whole.add if free == size else self._whole.discard)(group)
        (self._part.add if 0 < free < size else self._part.discard)(group)
