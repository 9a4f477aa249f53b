"""KV groups: layers with the same KV of a token, dropped at the same time."""

from headrace.backend_traits import KvDtype
from headrace.quant import kv
from headrace.record import frozen


@frozen
class KvLayout:
    """The keys and values of a layer for a token.

    `value_dim` is 0 if values are a part of the keys, as in MLA (DeepSeek-V2, 2024).
    """

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


@frozen
class KvGroup:
    """Layers with one KV layout and one window, which share KV blocks."""

    layers: tuple[int, ...]
    layout: KvLayout
    window: int = 0
    """Positions that a row sees, with its own; 0: all."""
    num_sink_tokens: int = 0
    """First positions, which every row sees."""
    has_key_bounds: bool = False
    """Whether each block has the bounds of its keys, for a choice of blocks."""

    @property
    def numbers(self) -> int:
        return len(self.layers) * self.layout.numbers

    def block_bytes(self, dtype: KvDtype, block_size: int) -> int:
        head_bytes = kv.block_bytes(dtype, self.layout.key_dim, self.layout.value_dim)
        if self.has_key_bounds:
            head_bytes += kv.bound_bytes(self.layout.key_dim)
        return self._num_heads * head_bytes * block_size // kv.BLOCK_SIZE

    @property
    def _num_heads(self) -> int:
        return len(self.layers) * self.layout.num_heads

    def row_bytes(self, dtype: KvDtype) -> float:
        """Mean bytes of the keys and values of a token, without bounds."""
        head_bytes = kv.block_bytes(dtype, self.layout.key_dim, self.layout.value_dim)
        return self._num_heads * head_bytes / kv.BLOCK_SIZE

    def num_blocks(self, num_tokens: int, max_rows: int, block_size: int) -> int:
        """Max blocks of a sequence with at most `max_rows` rows in a step."""
        num_blocks = -(-num_tokens // block_size)
        if not self.window:
            return num_blocks
        sink_blocks = -(-self.num_sink_tokens // block_size)
        window_blocks = (self.window + max_rows + block_size - 3) // block_size + 1
        return min(num_blocks, sink_blocks + window_blocks)


def number_bytes(groups: tuple[KvGroup, ...], dtype: KvDtype) -> float:
    """Mean bytes of a number, with scales and padding."""
    return sum(group.row_bytes(dtype) for group in groups) / sum(group.numbers for group in groups)


def token_bytes(groups: tuple[KvGroup, ...], dtype: KvDtype) -> int:
    """Bytes of a token, with scales and padding."""
    return -(-sum(group.block_bytes(dtype, kv.BLOCK_SIZE) for group in groups) // kv.BLOCK_SIZE)
