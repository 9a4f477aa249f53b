"""The block pool of layers with an attention window."""

from collections import Counter
from collections.abc import Collection, Iterable

from headrace.kv.blocks import NULL_BLOCK, BlockPool, Demand, Table


class WindowPool(BlockPool):
    """The blocks of layers whose rows see `window` positions and the first `num_sink_tokens`.

    Each table pays for all its blocks, also for shared ones. So a sequence may take a new block
    for each released one, and a prompt in chunks never needs more than at its admission.
    """

    def __init__(
        self, num_blocks: int, block_size: int, window: int, max_rows: int, num_sink_tokens: int = 0
    ) -> None:
        """`window` includes the row's own position. `max_rows` limits the rows of a sequence in a
        step.
        """
        super().__init__(num_blocks, block_size)
        self.num_sink_blocks = self.blocks_for(num_sink_tokens)
        self.window_blocks = self.blocks_for(window - 1)
        self._window = window
        self._max_rows = max_rows
        self._max_blocks = self._max_span(max_rows)
        """Max blocks of a table at once, without the sinks."""

    @property
    def num_available(self) -> int:
        """Blocks that no table pays for; negative if forks hold too many."""
        return self.num_blocks - self._num_references

    def max_blocks(self, demand: Demand) -> int:
        num_rows = min(self._max_rows, demand.num_tokens - demand.computed)
        num_blocks = min(
            self.blocks_for(demand.num_tokens), self.num_sink_blocks + self._max_span(num_rows)
        )
        return demand.width * num_blocks

    def num_shared(self, blocks: Iterable[int], freed: Collection[int] = ()) -> int:
        return 0

    def num_held_by(self, holders: Counter[int]) -> int:
        return holders.total()

    def freed_blocks(self, tables: Iterable[Table]) -> Collection[int]:
        return range(sum(table.num_held for table in tables))

    def first_visible(self, computed: int) -> int:
        return max(0, computed + 1 - self._window) // self.block_size

    def advance(self, table: Table, computed: int, num_known: int) -> None:
        """Release the blocks that no row from token `computed` on sees; take new ones, or fewer
        after forks.
        """
        num_before = table.num_released
        first = self.num_sink_blocks + num_before
        for i in range(first, min(self.first_visible(computed), len(table))):
            self._release(table[i])
            table[i] = NULL_BLOCK
            table.num_released += 1
        num_new = max(0, min(table.num_released - num_before, self.num_available))
        self._extend(table, min(len(table) + num_new, self.blocks_for(num_known)))

    def _max_span(self, num_rows: int) -> int:
        return (self._window + num_rows + self.block_size - 3) // self.block_size + 1

    def _table_length(self, computed: int, num_slots: int) -> int:
        first = max(self.num_sink_blocks, self.first_visible(computed))
        return min(super()._table_length(computed, num_slots), first + self._max_blocks)

    def _cost(self, num_new: int, num_shared: int) -> int:
        return num_new
