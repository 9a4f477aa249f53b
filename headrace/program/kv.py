"""What layers keep of a token, and for how long: layers that keep alike and see alike form a group,
which has blocks of its own.
"""

from headrace.backend_traits import KvDtype
from headrace.quant import kv
from headrace.record import frozen


@frozen
class KvLayout:
    """What one layer keeps of a token: a key and a value for each of some heads.

    A layer whose values are part of its keys has `value_dim` 0: the latent row of MLA (DeepSeek-V2,
    2024) is one head with a key of the latent and the rotated numbers.
    """

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of one token."""
        return self.num_heads * (self.key_dim + self.value_dim)


@frozen
class KvGroup:
    """Layers of one layout that see alike."""

    layers: tuple[int, ...]
    layout: KvLayout
    window: int = 0
    """Positions that a row sees, its own included; 0: all up to its own."""
    num_sink_tokens: int = 0
    """Positions at the beginning that a row sees beside its window."""

    @property
    def numbers(self) -> int:
        """Numbers of one token, all layers."""
        return len(self.layers) * self.layout.numbers

    def block_bytes(self, dtype: KvDtype, block_size: int) -> int:
        """Bytes of a block of so many tokens, all layers and heads."""
        bytes_per_block = (
            len(self.layers)
            * self.layout.num_heads
            * kv.block_bytes(dtype, self.layout.key_dim, self.layout.value_dim)
        )
        return bytes_per_block * block_size // kv.BLOCK_SIZE

    def num_blocks(self, num_tokens: int, max_rows: int, block_size: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at once, where a step has at
        most `max_rows` rows of it.

        Behind a window those are the blocks that the rows of a step, and what the first of them
        sees, can touch, and those of sinks.
        """
        whole, sinks = -(-num_tokens // block_size), -(-self.num_sink_tokens // block_size)
        return (
            min(whole, sinks + (self.window + max_rows + block_size - 3) // block_size + 1)
            if self.window
            else whole
        )


def number_bytes(groups: tuple[KvGroup, ...], dtype: KvDtype) -> float:
    """Bytes of one stored key or value number, its share of scales and padding included, in the
    mean over the groups.
    """
    block_bytes = sum(group.block_bytes(dtype, kv.BLOCK_SIZE) for group in groups)
    return block_bytes / (kv.BLOCK_SIZE * sum(group.numbers for group in groups))


def token_bytes(groups: tuple[KvGroup, ...], dtype: KvDtype) -> int:
    """Bytes of one token in all groups, its share of scales and padding included."""
    return -(-sum(group.block_bytes(dtype, kv.BLOCK_SIZE) for group in groups) // kv.BLOCK_SIZE)
