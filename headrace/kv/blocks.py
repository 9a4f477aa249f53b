"""The block pool: who owns which block of KV slots. It holds numbers only; the storage belongs to the backend.

A block is in the tables of one branch or, after a fork or a prefix hit, of several; it is free again when the last of them
lets it go. A shared block is never written: whoever must write gets a copy of its own first.

A free block is blank, or idle: its content is kept for whoever wants it again, until no blank block is left. Then those that
have been idle longest become blank, as many as make a run.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence
from typing import NamedTuple

Table = MutableSequence[int]
"""The blocks of a branch in position order, `HOLE` for those at the beginning that it let go before its end."""

HOLE = -1

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
        self._references = [0] * num_blocks
        self._kept: dict[int, Callable[[int], None]] = {}  # blocks that become idle, and whom to tell when they are given away
        self._idle = OrderedDict[int, None]()  # longest idle first
        self._num_blank = num_blocks
        groups = range(-(-num_blocks // _GROUP))
        self._blank_in_group = [min(_GROUP, num_blocks - group * _GROUP) for group in groups]
        self._whole = set(groups)  # groups of blank blocks only
        self._part = set[int]()  # groups with blank blocks and others

    @property
    def num_free(self) -> int:
        """Blocks that can be had, blank and idle."""
        return self._num_blank + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._idle)

    def idle_blocks(self) -> list[int]:
        """Blocks that nobody holds and whose content is kept, longest idle first."""
        return list(self._idle)

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
            if block != HOLE:
                self._references[block] += 1
        return table[:]

    def retain(self, block: int, forget: Callable[[int], None]) -> None:
        """Keep the content of a held block when it is let go; `forget(block)` is called when it is given away after all."""
        self._kept[block] = forget

    def share(self, table: Table, blocks: Iterable[int]) -> None:
        """Append blocks whose content is kept, held by others or idle."""
        for block in blocks:
            self._hold(block)
            table.append(block)

    def exchange(self, table: Table, index: int, block: int) -> None:
        """Let go of a block in favour of one with the same content, held by others or idle."""
        self._hold(block)
        self._release(table[index])
        table[index] = block

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are in a table."""
        return sum(self._references[block] > 0 for block in blocks)

    def trim(self, table: Table, computed: int) -> None:
        """Let go of the blocks beyond the first `computed` slots, the last first."""
        while len(table) > self.blocks_for(computed):
            if (block := table.pop()) != HOLE:
                self._release(block)

    def forgo(self, table: Table, first: int) -> None:
        """Let go of the blocks before slot `first`, which no row will see any more."""
        index = first // self.block_size - 1
        while index >= 0 and table[index] != HOLE:
            self._release(table[index])
            table[index] = HOLE
            index -= 1

    def free(self, table: Table) -> None:
        """Let go of all blocks."""
        self.trim(table, 0)

    def check(self, tables: list[Table]) -> None:
        """Assert that the pool and these tables, which are all there are, agree on every block."""
        held = [0] * self.num_blocks
        for table in tables:
            blocks = table[table.count(HOLE) :]
            assert len(set(blocks)) == len(blocks) and HOLE not in blocks, f"a block is twice in {table}, or a hole not at its start"
            for block in blocks:
                held[block] += 1
        assert held == self._references
        assert self.num_free == held.count(0)
        assert self._idle.keys() == {block for block in self._kept if not held[block]}
        assert self._num_blank == sum(self._blank_in_group)

    def _take(self, previous: int | None) -> int:
        """A free block: the one after `previous` if it is blank, else one that starts a run, else any."""
        if not self._num_blank:
            self._blank_idle()
        if previous is not None and previous + 1 < self.num_blocks and self._is_blank(previous + 1):
            block = previous + 1
        elif self._whole:
            block = next(iter(self._whole)) * _GROUP
        else:
            first = next(iter(self._part)) * _GROUP
            block = next(block for block in range(first, first + _GROUP) if self._is_blank(block))
        self._references[block] = 1
        self._count_blank(block // _GROUP, -1)
        return block

    def _blank_idle(self) -> None:
        """Blocks were let go from the end of a table to its start: a group of them is often a run."""
        for _ in range(min(_GROUP, len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            self._kept.pop(block)(block)
            self._count_blank(block // _GROUP, 1)

    def _is_blank(self, block: int) -> bool:
        return not self._references[block] and block not in self._idle

    def _hold(self, block: int) -> None:
        self._references[block] += 1
        self._idle.pop(block, None)

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is free already"
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._kept:
            self._idle[block] = None
        else:
            self._count_blank(block // _GROUP, 1)

    def _count_blank(self, group: int, change: int) -> None:
        self._num_blank += change
        self._blank_in_group[group] += change
        blank, size = self._blank_in_group[group], min(_GROUP, self.num_blocks - group * _GROUP)
        (self._whole.add if blank == size else self._whole.discard)(group)
        (self._part.add if 0 < blank < size else self._part.discard)(group)
