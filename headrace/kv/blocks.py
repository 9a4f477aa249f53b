"""The block pool: which sequence holds which block of KV slots. It holds numbers only; the storage
belongs to the backend.

A block is in the tables of one sequence or, after a fork or a prefix hit, of several; it is free
again when the last of them releases it. A shared block is never written: a sequence that must write
gets a copy of its own first.

A free block is either empty or evictable: the content of an evictable block is kept for a sequence
that wants it again, until no empty block is left. Then the least recently used evictable blocks are
evicted, as many as make a run.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

NULL_BLOCK = -1


if TYPE_CHECKING:
    _IntArray = array[int]
else:
    _IntArray = array


class Table(_IntArray):
    """The blocks of a sequence in position order.

    Behind the first `num_sink_blocks`, which stay, `num_released` are null blocks: no row will see
    what they held.
    """

    __slots__ = ("num_released", "num_sink_blocks")

    num_released: int
    num_sink_blocks: int

    def __new__(
        cls, blocks: Iterable[int] = (), num_released: int = 0, num_sink_blocks: int = 0
    ) -> "Table":
        table = cast("Table", super().__new__(cls, "i", blocks))
        table.num_released = num_released
        table.num_sink_blocks = num_sink_blocks
        return table

    @property
    def window_start(self) -> int:
        """Index of the block behind the null blocks; 0 where there are none."""
        return self.num_sink_blocks + self.num_released if self.num_released else 0

    @property
    def held(self) -> "array[int]":
        """The blocks without the null ones."""
        return (
            self[: self.num_sink_blocks] + self[self.window_start :] if self.num_released else self
        )

    @property
    def num_held(self) -> int:
        """Blocks that the sequence has."""
        return len(self) - self.num_released


_RUN = 8
"""Blocks whose numbers share a quotient by this are contiguous in memory, in ascending order."""


class Reservation(NamedTuple):
    """What it takes to make slots writable: a table of `length` blocks, the shared ones among them,
    by index, replaced.
    """

    length: int
    shared: list[int]


NOTHING_TO_DO = Reservation(0, [])


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, with reference counts, for layers that see
    everything.
    """

    reach = inf
    """Blocks before a block boundary that the row behind it sees, where there are so many, beside
    the sinks.
    """
    num_sink_blocks = 0
    """Blocks at the beginning of a table that all rows see."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._num_references = 0
        self._kept: dict[
            int, Callable[[int], None]
        ] = {}  # blocks that become evictable, and what to call when they are evicted
        self._evictable = OrderedDict[int, None]()  # least recently used first
        self._num_empty = num_blocks
        runs = range(-(-num_blocks // _RUN))
        self._empty_in_run = [min(_RUN, num_blocks - run * _RUN) for run in runs]
        self._whole = set(runs)  # runs of empty blocks only
        self._part = set[int]()  # runs with empty blocks and others

    @property
    def num_free(self) -> int:
        """Blocks in no table, empty and evictable."""
        return self._num_empty + len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that sequences may take."""
        return self.num_free

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

    def needed(self, num_tokens: int, computed: int = 0, width: int = 1, common: int = 0) -> int:
        """Most blocks that `width` sequences hold at once until they have `num_tokens` tokens each,
        of which so many are computed.

        They share those of the first `common` tokens.
        """
        whole = self.blocks_for(num_tokens)
        return whole + (width - 1) * (whole - common // self.block_size)

    def first_seen(self, computed: int) -> int:
        """Index of the first block behind the sinks that rows from token `computed` on see."""
        return 0

    def new_table(self) -> Table:
        """The table of a sequence that has no blocks."""
        return Table(num_sink_blocks=self.num_sink_blocks)

    def slot(self, table: Table, index: int) -> int:
        """The slot of the `index`-th token of a sequence."""
        return table[index // self.block_size] * self.block_size + index % self.block_size

    def plan(self, table: Table, computed: int, length: int) -> Reservation | None:
        """What it takes to make slots `computed` to `computed + length - 1` writable: there, and in
        no other table.

        None where there are not enough blocks.
        """
        if (
            length == 1
            and (index := computed // self.block_size) < len(table)
            and self._references[table[index]] == 1
        ):
            return NOTHING_TO_DO  # so it is most of the time
        needed = self._table_length(computed, length)
        shared = [
            i
            for i in range(computed // self.block_size, min(needed, len(table)))
            if self._references[table[i]] > 1
        ]
        if needed <= len(table) and not shared:
            return NOTHING_TO_DO
        if self._price(max(0, needed - len(table)), len(shared)) > self.num_available:
            return None
        return Reservation(needed, shared)

    def carry_out(self, table: Table, plan: Reservation) -> list[tuple[int, int]]:
        """Extend the table and replace shared blocks; returns the copies to make, (source, target),
        block by block.
        """
        copies = []
        for i in plan.shared:
            source, table[i] = table[i], self._take(table[i - 1] if i else NULL_BLOCK)
            self._release(source)
            copies.append((source, table[i]))
        self._extend(table, plan.length)
        return copies

    def reserve(self, table: Table, computed: int, length: int) -> list[tuple[int, int]] | None:
        """Make slots `computed` to `computed + length - 1` of the table writable.

        Returns the copies to make, (source, target), block by block, or None, with nothing changed,
        when there are not enough blocks.
        """
        plan = self.plan(table, computed, length)
        return None if plan is None else self.carry_out(table, plan)

    def keep(self, table: Table, end: int, path: list[int]) -> list[tuple[int, int]]:
        """Keep the first `end` slots and, right after them, those that were `path[i]` beyond;
        release the rest.

        Returns the slots to move, (source, target), before anything else is written.
        """
        moves = [
            (self.slot(table, end + node), self.slot(table, end + i))
            for i, node in enumerate(path)
            if node != i
        ]
        self.trim(table, end + len(path))
        return moves

    def fork(self, table: Table) -> Table:
        """A second table of the same blocks."""
        for block in table.held:
            self._references[block] += 1
        self._num_references += table.num_held
        return Table(table, table.num_released, table.num_sink_blocks)

    def retain(self, block: int, forget: Callable[[int], None]) -> None:
        """Keep the content of a held block when it is released; `forget(block)` is called when it
        is evicted.
        """
        self._kept[block] = forget

    def let_go(self, block: int) -> None:
        """Keep the content of a block no longer."""
        del self._kept[block]
        if block in self._evictable:
            del self._evictable[block]
            self._count_empty(block // _RUN, 1)

    def share(self, table: Table, blocks: Iterable[int]) -> None:
        """Begin a table with blocks whose content is kept, held by others or evictable, and null
        blocks in their places.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                table.num_released += 1
            else:
                self._hold(block)
            table.append(block)

    def fill(self, table: Table, index: int) -> int:
        """Put an empty block where a table that `share` began has a null block; returns it."""
        table[index] = self._take(table[index - 1] if index else NULL_BLOCK)
        table.num_released -= 1
        return table[index]

    def exchange(self, table: Table, index: int, block: int) -> None:
        """Release a block in favour of one with the same content, held by others or evictable."""
        self._hold(block)
        self._release(table[index])
        table[index] = block

    def num_shared(self, blocks: Iterable[int]) -> int:
        """How many of the blocks another sequence may have at no cost: those that are in a
        table.
        """
        return sum(block != NULL_BLOCK and self._references[block] > 0 for block in blocks)

    def trim(self, table: Table, computed: int) -> None:
        """Release the blocks beyond the first `computed` slots, the last first."""
        length = self.blocks_for(computed)
        while len(table) > length:
            if (block := table.pop()) != NULL_BLOCK:
                self._release(block)
        table.num_released = max(0, min(table.num_released, len(table) - table.num_sink_blocks))

    def free(self, table: Table) -> None:
        """Release all blocks."""
        self.trim(table, 0)

    def check(self, tables: list[Table]) -> None:
        """Assert that the pool and these tables, which are all there are, agree on every block."""
        held = [0] * self.num_blocks
        for table in tables:
            blocks = table.held.tolist()
            assert table.num_sink_blocks == self.num_sink_blocks and len(
                blocks
            ) == table.num_held == len(table) - table.count(NULL_BLOCK)
            assert len(set(blocks)) == len(blocks) and NULL_BLOCK not in blocks, (
                f"a block is twice in {table}, or a null block out of place"
            )
            for block in blocks:
                held[block] += 1
        assert held == self._references and sum(held) == self._num_references
        assert self.num_free == held.count(0)
        assert self._evictable.keys() == {block for block in self._kept if not held[block]}
        assert self._num_empty == sum(self._empty_in_run)

    def _table_length(self, computed: int, length: int) -> int:
        """Blocks of a table, released ones included, with slots for `length` tokens behind the
        computed ones.
        """
        return self.blocks_for(computed + length)

    def _price(self, num_new: int, num_shared: int) -> int:
        """Available blocks that it costs to take so many new ones and to replace so many shared
        ones.
        """
        return num_new + num_shared

    def _extend(self, table: Table, length: int) -> None:
        while len(table) < length:
            table.append(self._take(table[-1] if table else NULL_BLOCK))

    def _take(self, previous: int) -> int:
        """A free block: the one after `previous` if it is empty, else one that starts a run, else
        any.
        """
        if not self._num_empty:
            self._evict()
        if (
            previous != NULL_BLOCK
            and previous + 1 < self.num_blocks
            and self._is_empty(previous + 1)
        ):
            block = previous + 1
        elif self._whole:
            block = next(iter(self._whole)) * _RUN
        else:
            first = next(iter(self._part)) * _RUN
            block = next(block for block in range(first, first + _RUN) if self._is_empty(block))
        self._references[block] = 1
        self._num_references += 1
        self._count_empty(block // _RUN, -1)
        return block

    def _evict(self) -> None:
        """Blocks are released from the end of a table to its start, so some of them are often a
        run.
        """
        for _ in range(min(_RUN, len(self._evictable))):
            block, _ = self._evictable.popitem(last=False)
            self._kept.pop(block)(block)
            self._count_empty(block // _RUN, 1)

    def _is_empty(self, block: int) -> bool:
        return not self._references[block] and block not in self._evictable

    def _hold(self, block: int) -> None:
        self._references[block] += 1
        self._num_references += 1
        self._evictable.pop(block, None)

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is free already"
        self._references[block] -= 1
        self._num_references -= 1
        if self._references[block]:
            return
        if block in self._kept:
            self._evictable[block] = None
        else:
            self._count_empty(block // _RUN, 1)

    def _count_empty(self, run: int, change: int) -> None:
        self._num_empty += change
        self._empty_in_run[run] += change
        empty, size = self._empty_in_run[run], min(_RUN, self.num_blocks - run * _RUN)
        (self._whole.add if empty == size else self._whole.discard)(run)
        (self._part.add if 0 < empty < size else self._part.discard)(run)
