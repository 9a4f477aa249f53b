"""The KV of sequences: a pool and a table for each KV group. An operation changes all groups or
none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import KvConfig
from headrace.kv.blocks import NO_CHANGE, Allocation, BlockPool, Demand, Table
from headrace.kv.host import HostTier
from headrace.kv.window import WindowPool
from headrace.program.kv import KvGroup

if TYPE_CHECKING:  # a start without a disk tier needs neither threads nor hashes
    from headrace.kv.disk import DiskTier

Tables = tuple[Table, ...]


class Copy(NamedTuple):
    """A copy of KV from slot to slot."""

    group: int
    source: int
    target: int


class BlockCopy(NamedTuple):
    """A copy of the first slots of a block, those with KV, to another block."""

    group: int
    source: int
    target: int
    num_slots: int


class KvManager:
    def __init__(
        self,
        groups: Sequence[KvGroup],
        kv: KvConfig,
        max_rows: int,
        host: HostTier | None = None,
        disk: "DiskTier | None" = None,
    ) -> None:
        """`max_rows` limits the slots of one allocation."""
        self.block_size = kv.block_size
        self.max_rows = max_rows
        self.host = host or HostTier()
        self.disk = disk
        self._groups = list(zip(groups, kv.num_blocks, strict=True))
        self.reset()

    def reset(self) -> None:
        """Empty all blocks, and invalidate all tables."""
        self.pools: list[BlockPool] = [
            WindowPool(
                num_blocks=num_blocks,
                block_size=self.block_size,
                window=group.window,
                max_rows=self.max_rows,
                num_sink_tokens=group.num_sink_tokens,
            )
            if group.window
            else BlockPool(num_blocks, self.block_size)
            for group, num_blocks in self._groups
        ]
        self._window_pools = [
            (group, pool) for group, pool in enumerate(self.pools) if isinstance(pool, WindowPool)
        ]
        self.host.reset()
        if self.disk:
            self.disk.reset()

    def record(self, rows: int, seconds: float) -> None:
        """Note the time of a step: the tiers compare it with the time to load blocks."""
        self.host.record(rows, seconds)
        if self.disk:
            self.disk.record(rows, seconds)

    def run_loads(self) -> None:
        """Issue the queued loads of all tiers, before the next launch."""
        self.host.run_loads()
        if self.disk:
            self.disk.run_loads()

    def is_loading(self, group: int, block: int) -> bool:
        """Whether a queued load will fill a block."""
        return self.host.is_loading(group, block) or bool(
            self.disk and self.disk.is_loading(group, block)
        )

    def close(self) -> None:
        """Close the tiers, before the memory of the blocks is freed."""
        if self.disk:
            self.disk.close()
        self.host.close()

    # Tables

    def new_tables(self) -> Tables:
        return tuple(pool.new_table() for pool in self.pools)

    def allocate(self, tables: Tables, computed: int, num_slots: int) -> list[BlockCopy] | None:
        """Make `num_slots` slots from token `computed` on writable.

        A window gets only the slots that a step can use. Returns the block copies to make first.
        Returns None, and changes no state, without enough blocks.
        """
        plans: list[tuple[int, Allocation]] = []
        for group, table in enumerate(tables):
            plan = self.pools[group].plan(table, computed, num_slots)
            if plan is None:
                return None
            if plan is not NO_CHANGE:
                plans.append((group, plan))
        if not plans:
            return []
        size = self.block_size
        return [
            BlockCopy(group, source, target, num_slots=min(size, computed - index * size))
            for group, plan in plans
            for index, (source, target) in zip(
                plan.shared, self.pools[group].apply(tables[group], plan), strict=True
            )
            if computed > index * size  # else the block has no KV yet
        ]

    def has_slot(self, tables: Tables, computed: int) -> bool:
        """Whether token `computed` has a slot in blocks that no other sequence holds."""
        index = computed // self.block_size
        for pool, table in zip(self.pools, tables, strict=True):
            if index >= len(table) or pool.references[table[index]] != 1:
                return False
        return True

    def advance(self, tables: Tables, computed: int, num_known: int) -> None:
        """Release the blocks that no row from token `computed` on sees, for new tokens."""
        for group, pool in self._window_pools:
            pool.advance(tables[group], computed, num_known)

    def keep_path(self, tables: Tables, end: int, path: list[int]) -> list[Copy]:
        """Keep the first `end` slots and an accepted draft path; returns the slots to move
        first.
        """
        return [
            Copy(group, source, target)
            for group, table in enumerate(tables)
            for source, target in self.pools[group].keep_path(table, end, path)
        ]

    def fork(self, tables: Tables) -> Tables:
        return tuple(pool.fork(table) for pool, table in zip(self.pools, tables, strict=True))

    def share(self, tables: Tables, blocks: Sequence[Sequence[int]]) -> None:
        for pool, table, group_blocks in zip(self.pools, tables, blocks, strict=True):
            pool.share(table, group_blocks)

    def trim(self, tables: Tables, computed: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.trim(table, computed)

    def free(self, tables: Tables) -> None:
        self.trim(tables, 0)

    def can_rewind(self, tables: Tables, computed: int) -> bool:
        """Whether the tables hold all blocks that rows from token `computed` on see."""
        return all(
            tables[group].window_start <= pool.first_visible(computed)
            for group, pool in self._window_pools
        )

    def slot_copies(self, block_copies: Sequence[BlockCopy]) -> list[Copy]:
        size = self.block_size
        return [
            Copy(copy.group, copy.source * size + i, copy.target * size + i)
            for copy in block_copies
            for i in range(copy.num_slots)
        ]

    # Available blocks

    @property
    def has_windows(self) -> bool:
        return bool(self._window_pools)

    @property
    def num_available(self) -> int:
        return min(pool.num_available for pool in self.pools)

    @property
    def is_overcommitted(self) -> bool:
        """Whether forks hold more blocks than a group has, which demands preemption."""
        return bool(self._window_pools) and any(
            pool.num_available < 0 for _, pool in self._window_pools
        )

    def num_slots_after(self, tables: Tables, end: int) -> int:
        """Slots from token `end` on, held or available, in every group."""
        num_blocks = min(
            len(table) + pool.num_available for pool, table in zip(self.pools, tables, strict=True)
        )
        return num_blocks * self.block_size - end

    def can_extend(self, tables: Sequence[Tables], ends: Sequence[int]) -> bool:
        """Whether all sequences can grow to their ends, in tokens, together."""
        num_blocks = [-(-end // self.block_size) for end in ends]
        for group, pool in enumerate(self.pools):
            num_new = sum(
                max(0, count - len(seq_tables[group]))
                for count, seq_tables in zip(num_blocks, tables, strict=True)
            )
            if num_new > pool.num_available:
                return False
        return True

    def fits(
        self,
        new: Demand,
        hit: Sequence[Sequence[int]],
        running: Sequence[tuple[Tables, Demand]] = (),
        ended: Sequence[Tables] = (),
    ) -> bool:
        """Whether new sequences, which share the blocks `hit`, fit with a spare block for each
        running one, once the tables of `ended` sequences are freed.
        """
        for group, pool in enumerate(self.pools):
            freed = pool.freed_blocks(tables[group] for tables in ended) if ended else ()
            num_needed = pool.max_blocks(new) - pool.num_shared(hit[group], freed)
            num_left = pool.num_available + len(freed) - num_needed - len(running)
            if num_left < 0:
                return False
            num_promised = sum(
                max(0, pool.max_blocks(demand) - tables[group].num_held)
                for tables, demand in running
            )
            if num_promised > num_left:
                return False
        return True

    def check(self, tables: Sequence[Tables]) -> None:
        for group, pool in enumerate(self.pools):
            pool.check([seq_tables[group] for seq_tables in tables])
        self.host.check()
