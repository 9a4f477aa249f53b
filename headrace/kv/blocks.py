"""The block pool: which sequence holds which block of KV slots. The backend has the storage.

Shared blocks are never written; a writer gets a copy. A free block is empty or evictable: kept
for a later prefix hit, the least recently used evicted first.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

NULL_BLOCK = -1

_RUN = 8
"""Blocks that are contiguous in memory."""

if TYPE_CHECKING:
    _IntArray = array[int]
else:
    _IntArray = array


class Table(_IntArray):
    """The blocks of a sequence, in position order.

    With a window, `num_released` places after the first `num_sink_blocks` hold null blocks.
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
        return self.num_sink_blocks + self.num_released if self.num_released else 0

    @property
    def held(self) -> "array[int]":
        if not self.num_released:
            return self
        return self[: self.num_sink_blocks] + self[self.window_start :]

    @property
    def num_held(self) -> int:
        return len(self) - self.num_released


class Demand(NamedTuple):
    """The size to which `width` sequences of `num_tokens` tokens grow."""

    num_tokens: int
    computed: int = 0
    """Tokens with KV now."""
    width: int = 1
    """Sequences, which share the KV of their first `common` tokens."""
    common: int = 0


class Allocation(NamedTuple):
    """A planned change of a table: new length, and shared blocks to copy, by index."""

    num_blocks: int
    shared: list[int]


NO_CHANGE = Allocation(0, [])


class BlockPool:
    """The reference-counted blocks of layers that attend to the whole context."""

    window_blocks = inf
    """Blocks before a block boundary that the row after it sees."""
    num_sink_blocks = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        """Tables that hold each block."""
        self._num_references = 0

        # Cached blocks become evictable when they are free; the value is called on eviction.
        self._cached: dict[int, Callable[[int], None]] = {}
        self._evictable = OrderedDict[int, None]()  # least recently used first

        self._num_empty = num_blocks
        runs = range(-(-num_blocks // _RUN))
        self._empty_in_run = [min(_RUN, num_blocks - run * _RUN) for run in runs]
        self._empty_runs = set(runs)
        self._partly_empty_runs = set[int]()

    # Counts

    @property
    def num_free(self) -> int:
        """Blocks in no table, empty or evictable."""
        return self._num_empty + len(self._evictable)

    @property
    def num_available(self) -> int:
        return self.num_free

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def evictable_blocks(self) -> list[int]:
        """Free blocks whose content is kept, least recently used first."""
        return list(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks(self, demand: Demand) -> int:
        """The max number of blocks at once during growth."""
        num_blocks = self.blocks_for(demand.num_tokens)
        num_shared = demand.common // self.block_size
        return num_blocks + (demand.width - 1) * (num_blocks - num_shared)

    def num_shared(self, blocks: Iterable[int], freed: Collection[int] = ()) -> int:
        """Count the blocks that are in a table, so that sharing them needs no free block.

        Blocks of `freed` count as in none.
        """
        return sum(
            block != NULL_BLOCK and self.references[block] > 0 and block not in freed
            for block in blocks
        )

    def num_held_by(self, holders: Counter[int]) -> int:
        """Count the blocks that tables hold, given the number of tables by block."""
        return len(holders)

    def freed_blocks(self, tables: Iterable[Table]) -> Collection[int]:
        """Return the blocks that would be available without these tables."""
        held = Counter(block for table in tables for block in table.held)
        return {block for block, count in held.items() if count == self.references[block]}

    # Tables

    def new_table(self) -> Table:
        return Table(num_sink_blocks=self.num_sink_blocks)

    def slot(self, table: Table, index: int) -> int:
        return table[index // self.block_size] * self.block_size + index % self.block_size

    def first_visible(self, computed: int) -> int:
        """Index of the first block after the sinks that rows from token `computed` on see."""
        return 0

    def plan(self, table: Table, computed: int, num_slots: int) -> Allocation | None:
        """Plan `num_slots` slots from token `computed` on; None without enough blocks."""
        # The usual case: one slot in a block that this sequence already has for itself.
        index = computed // self.block_size
        if num_slots == 1 and index < len(table) and self.references[table[index]] == 1:
            return NO_CHANGE

        num_blocks = self._table_length(computed, num_slots)
        shared = [
            i
            for i in range(computed // self.block_size, min(num_blocks, len(table)))
            if self.references[table[i]] > 1
        ]
        num_new = max(0, num_blocks - len(table))
        if not num_new and not shared:
            return NO_CHANGE
        if self._cost(num_new, len(shared)) > self.num_available:
            return None
        return Allocation(num_blocks, shared)

    def apply(self, table: Table, plan: Allocation) -> list[tuple[int, int]]:
        """Carry out a plan; returns the copies to make, (source, target)."""
        copies = []
        for i in plan.shared:
            source, table[i] = table[i], self._pop_block(table[i - 1] if i else NULL_BLOCK)
            self._release(source)
            copies.append((source, table[i]))
        self._extend(table, plan.num_blocks)
        return copies

    def allocate(self, table: Table, computed: int, num_slots: int) -> list[tuple[int, int]] | None:
        """Make `num_slots` slots from token `computed` on writable.

        Returns the copies (source, target) to make first. Returns None, and changes no state,
        without enough blocks.
        """
        plan = self.plan(table, computed, num_slots)
        return None if plan is None else self.apply(table, plan)

    def keep_path(self, table: Table, end: int, path: list[int]) -> list[tuple[int, int]]:
        """Keep the first `end` slots and the slots of an accepted draft path; free the rest.

        Node `i` is in slot `end + i`. Returns the slots to move first, (source, target).
        """
        moves = [
            (self.slot(table, end + node), self.slot(table, end + i))
            for i, node in enumerate(path)
            if node != i
        ]
        self.trim(table, end + len(path))
        return moves

    def trim(self, table: Table, computed: int) -> None:
        num_blocks = self.blocks_for(computed)
        while len(table) > num_blocks:
            block = table.pop()
            if block != NULL_BLOCK:
                self._release(block)
        table.num_released = max(0, min(table.num_released, len(table) - table.num_sink_blocks))

    def free(self, table: Table) -> None:
        self.trim(table, 0)

    def fork(self, table: Table) -> Table:
        for block in table.held:
            self.references[block] += 1
        self._num_references += table.num_held
        return Table(table, table.num_released, table.num_sink_blocks)

    # The prefix cache

    def cache(self, block: int, on_evict: Callable[[int], None]) -> None:
        """Keep the content of a held block, until `on_evict(block)` is called."""
        self._cached[block] = on_evict

    def uncache(self, block: int) -> None:
        """Stop keeping the content of a block, without `on_evict`."""
        del self._cached[block]
        if block in self._evictable:
            del self._evictable[block]
            self._count_empty(block // _RUN, 1)

    def share(self, table: Table, blocks: Iterable[int]) -> None:
        """Append cached blocks and null blocks to an empty table."""
        for block in blocks:
            if block == NULL_BLOCK:
                table.num_released += 1
            else:
                self._touch(block)
            table.append(block)

    def fill_null(self, table: Table, index: int) -> int:
        """Replace a null block of a shared table by an empty block; returns it."""
        table[index] = self._pop_block(table[index - 1] if index else NULL_BLOCK)
        table.num_released -= 1
        return table[index]

    def replace(self, table: Table, index: int, block: int) -> None:
        self._touch(block)
        self._release(table[index])
        table[index] = block

    def check(self, tables: list[Table]) -> None:
        held = [0] * self.num_blocks
        for table in tables:
            blocks = table.held.tolist()
            assert table.num_sink_blocks == self.num_sink_blocks
            assert len(blocks) == table.num_held == len(table) - table.count(NULL_BLOCK)
            assert len(set(blocks)) == len(blocks) and NULL_BLOCK not in blocks, (
                f"a block occurs twice in {table}, or a null block is out of place"
            )
            for block in blocks:
                held[block] += 1
        assert held == self.references and sum(held) == self._num_references
        assert self.num_free == held.count(0)
        assert self._evictable.keys() == {block for block in self._cached if not held[block]}
        assert self._num_empty == sum(self._empty_in_run)

    # Blocks

    def _table_length(self, computed: int, num_slots: int) -> int:
        return self.blocks_for(computed + num_slots)

    def _cost(self, num_new: int, num_shared: int) -> int:
        return num_new + num_shared

    def _extend(self, table: Table, num_blocks: int) -> None:
        while len(table) < num_blocks:
            table.append(self._pop_block(table[-1] if table else NULL_BLOCK))

    def _pop_block(self, previous: int) -> int:
        """Take the empty block after `previous`, else the first of an empty run, else any."""
        if not self._num_empty:
            self._evict()
        following = previous + 1
        if previous != NULL_BLOCK and following < self.num_blocks and self._is_empty(following):
            block = following
        elif self._empty_runs:
            block = next(iter(self._empty_runs)) * _RUN
        else:
            first = next(iter(self._partly_empty_runs)) * _RUN
            block = next(block for block in range(first, first + _RUN) if self._is_empty(block))
        self.references[block] = 1
        self._num_references += 1
        self._count_empty(block // _RUN, -1)
        return block

    def _evict(self) -> None:
        """Evict several blocks, which are often a run."""
        for _ in range(min(_RUN, len(self._evictable))):
            block, _ = self._evictable.popitem(last=False)
            on_evict = self._cached.pop(block)
            on_evict(block)
            self._count_empty(block // _RUN, 1)

    def _is_empty(self, block: int) -> bool:
        return not self.references[block] and block not in self._evictable

    def _touch(self, block: int) -> None:
        self.references[block] += 1
        self._num_references += 1
        self._evictable.pop(block, None)

    def _release(self, block: int) -> None:
        assert self.references[block] > 0, f"block {block} is already free"
        self.references[block] -= 1
        self._num_references -= 1
        if self.references[block]:
            return
        if block in self._cached:
            self._evictable[block] = None
        else:
            self._count_empty(block // _RUN, 1)

    def _count_empty(self, run: int, change: int) -> None:
        self._num_empty += change
        self._empty_in_run[run] += change
        num_empty = self._empty_in_run[run]
        run_size = min(_RUN, self.num_blocks - run * _RUN)
        if num_empty == run_size:
            self._empty_runs.add(run)
        else:
            self._empty_runs.discard(run)
        if 0 < num_empty < run_size:
            self._partly_empty_runs.add(run)
        else:
            self._partly_empty_runs.discard(run)
