"""The block pool of layers with a window: a sequence releases what no row of it will see any more,
and goes on in what it gets back.

What all rows see, the sinks at the beginning, it keeps.

A table pays for each of its blocks, shared or not. So every block that it releases is one that it
may take, whatever other sequence shared it, and a prompt that is computed chunk by chunk needs no
more blocks than it had when it was admitted. What sequences share in front of their windows costs
them time only once, as everywhere, but memory on paper as often as there are sequences.
"""

from collections.abc import Iterable

from headrace.kv.blocks import NULL_BLOCK, BlockPool, Table


class WindowPool(BlockPool):
    """Blocks for layers whose rows see `window` positions, their own included, and the first
    `num_sink_tokens`.

    A step has at most `max_rows` rows of a sequence.
    """

    def __init__(
        self, num_blocks: int, block_size: int, window: int, max_rows: int, num_sink_tokens: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.num_sink_blocks = self.blocks_for(num_sink_tokens)
        self.reach = self.blocks_for(window - 1)
        self._window = window
        self._max_rows = max_rows
        self._most = self._span(max_rows)
        """Blocks of a table at once, beside the sinks."""

    @property
    def num_available(self) -> int:
        """Blocks that tables do not pay for. Below 0 after forks that cannot all stay."""
        return self.num_blocks - self._num_references

    def needed(self, num_tokens: int, computed: int = 0, width: int = 1, common: int = 0) -> int:
        return width * min(
            self.blocks_for(num_tokens),
            self.num_sink_blocks + self._span(min(self._max_rows, num_tokens - computed)),
        )

    def first_seen(self, computed: int) -> int:
        return max(0, computed + 1 - self._window) // self.block_size

    def num_shared(self, blocks: Iterable[int]) -> int:
        return 0

    def advance(self, table: Table, computed: int, num_known: int) -> None:
        """Release what no row from `computed` on sees, and take as many blocks for known tokens
        beyond the end of the table.

        Fewer where forks cannot all stay.
        """
        before = table.num_released
        for i in range(self.num_sink_blocks + before, min(self.first_seen(computed), len(table))):
            self._release(table[i])
            table[i] = NULL_BLOCK
            table.num_released += 1
        num_new = max(0, min(table.num_released - before, self.num_available))
        self._extend(table, min(len(table) + num_new, self.blocks_for(num_known)))

    def _span(self, num_rows: int) -> int:
        """Most blocks that so many rows, and what the first of them sees, can touch."""
        return (self._window + num_rows + self.block_size - 3) // self.block_size + 1

    def _table_length(self, computed: int, length: int) -> int:
        return min(
            super()._table_length(computed, length),
            max(self.num_sink_blocks, self.first_seen(computed)) + self._most,
        )

    def _price(self, num_new: int, num_shared: int) -> int:
        return num_new
