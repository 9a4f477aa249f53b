"""The KV of sequences over all groups of layers: a pool and a table for each, and every operation
on all of them or on none.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.config import KvConfig
from headrace.kv.blocks import NOTHING_TO_DO, BlockPool, Reservation, Table
from headrace.kv.host import HostTier
from headrace.kv.window import WindowPool
from headrace.program.kv import KvGroup

Tables = tuple[Table, ...]
"""The blocks of a sequence in each group."""


class Copy(NamedTuple):
    """KV to be copied from block to block, or from slot to slot, of a group."""

    group: int
    source: int
    target: int


class Demand(NamedTuple):
    """What one or several sequences that have something in common come to, each with a table of its
    own.
    """

    num_tokens: int
    computed: int
    width: int = 1
    """Sequences."""
    common: int = 0
    """Tokens that they share."""


class KvManager:
    """One pool for each group. `max_rows`: most rows of a sequence in a step, or slots that are
    reserved for it at once.

    `host`: where the prefix cache keeps what is evicted.
    """

    def __init__(
        self, groups: Sequence[KvGroup], kv: KvConfig, max_rows: int, host: HostTier | None = None
    ) -> None:
        self.block_size = kv.block_size
        self.max_rows = max_rows
        self.host = host or HostTier()
        self._sizes = list(zip(groups, kv.num_blocks, strict=True))
        self.restart()

    def restart(self) -> None:
        """Let all blocks be empty; the tables that there are have no meaning any more."""
        size = self.block_size
        self.pools: list[BlockPool] = [
            WindowPool(num_blocks, size, group.window, self.max_rows, group.num_sink_tokens)
            if group.window
            else BlockPool(num_blocks, size)
            for group, num_blocks in self._sizes
        ]
        self._windowed = [
            (group, pool) for group, pool in enumerate(self.pools) if isinstance(pool, WindowPool)
        ]
        self.host.restart()

    def new_tables(self) -> Tables:
        """Those of a sequence that has no blocks."""
        return tuple(pool.new_table() for pool in self.pools)

    def reserve(self, tables: Tables, computed: int, length: int) -> list[Copy] | None:
        """Make slots `computed` to `computed + length - 1` writable, in a group with a window as
        many of them as a step can use.

        Returns the blocks to copy before the next step writes anything, or None, with nothing
        changed, when there are not enough.
        """
        plans: list[tuple[int, Reservation]] = []
        for group, table in enumerate(tables):
            plan = self.pools[group].plan(table, computed, length)
            if plan is None:
                return None
            if plan is not NOTHING_TO_DO:
                plans.append((group, plan))
        return [
            Copy(group, *copy)
            for group, plan in plans
            for copy in self.pools[group].carry_out(tables[group], plan)
        ]

    def advance(self, tables: Tables, computed: int, num_known: int) -> None:
        """Release what no row from `computed` on sees; with what it gets back a group with a window
        prepares for known tokens.
        """
        for group, pool in self._windowed:
            pool.advance(tables[group], computed, num_known)

    def keep(self, tables: Tables, end: int, path: list[int]) -> list[Copy]:
        """Keep the first `end` slots and, right after them, those that were `path[i]` beyond;
        release the rest.

        Returns the slots to move before anything else is written.
        """
        return [
            Copy(group, *move)
            for group, table in enumerate(tables)
            for move in self.pools[group].keep(table, end, path)
        ]

    def fork(self, tables: Tables) -> Tables:
        """Second tables of the same blocks."""
        return tuple(pool.fork(table) for pool, table in zip(self.pools, tables, strict=True))

    def share(self, tables: Tables, blocks: Sequence[Sequence[int]]) -> None:
        """Begin tables with the kept `blocks` of each group, null blocks where a window does not
        reach.
        """
        for pool, table, shared in zip(self.pools, tables, blocks, strict=True):
            pool.share(table, shared)

    def trim(self, tables: Tables, computed: int) -> None:
        """Release the blocks beyond the first `computed` slots."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.trim(table, computed)

    def free(self, tables: Tables) -> None:
        """Release all blocks."""
        self.trim(tables, 0)

    def sees_all(self, tables: Tables, computed: int) -> bool:
        """Whether the tables have all that rows from `computed` on see of what is computed."""
        return all(
            tables[group].window_start <= pool.first_seen(computed)
            for group, pool in self._windowed
        )

    def slots_of(self, copies: Sequence[Copy]) -> list[Copy]:
        """The same copies of blocks slot by slot."""
        size = self.block_size
        return [
            Copy(c.group, c.source * size + i, c.target * size + i)
            for c in copies
            for i in range(size)
        ]

    def num_slots_beyond(self, tables: Tables, end: int) -> int:
        """Slots from token `end` on that there are, or that there are blocks for."""
        pairs = zip(self.pools, tables, strict=True)
        return (
            min((len(table) + pool.num_available) * self.block_size for pool, table in pairs) - end
        )

    def can_extend(self, tables: Sequence[Tables], ends: Sequence[int]) -> bool:
        """Whether there are blocks for all sequences up to these many tokens of each."""
        lengths = [-(-end // self.block_size) for end in ends]
        return all(
            sum(
                max(0, length - len(each[group]))
                for length, each in zip(lengths, tables, strict=True)
            )
            <= pool.num_available
            for group, pool in enumerate(self.pools)
        )

    def fits(
        self,
        new: Demand,
        hit: Sequence[Sequence[int]],
        running: Sequence[tuple[Tables, Demand]] = (),
    ) -> bool:
        """Whether there are blocks for what is new beside what running sequences will take, and one
        more for each of those.

        `hit`: blocks of each group that are there already.
        """
        for group, pool in enumerate(self.pools):
            promised = sum(
                max(0, pool.needed(*demand) - tables[group].num_held) for tables, demand in running
            )
            if (
                pool.needed(*new) - pool.num_shared(hit[group]) + promised + len(running)
                > pool.num_available
            ):
                return False
        return True

    @property
    def has_windows(self) -> bool:
        """Whether a group has a window, so that sequences go on in blocks that they release."""
        return bool(self._windowed)

    @property
    def num_available(self) -> int:
        """Blocks that there are at least in every group."""
        return min(pool.num_available for pool in self.pools)

    @property
    def is_overdrawn(self) -> bool:
        """Whether sequences must give way because there are not enough blocks for all of the
        forks.
        """
        return bool(self._windowed) and any(pool.num_available < 0 for _, pool in self._windowed)

    def check(self, tables: Sequence[Tables]) -> None:
        """Assert that the pools and these tables, which are all there are, agree on every block."""
        for group, pool in enumerate(self.pools):
            pool.check([each[group] for each in tables])
        self.host.check()
