"""How much KV an engine keeps: of what the weights and the runtime leave of memory, as much as its
sequences may need.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from headrace.config import EngineConfig, KvConfig
from headrace.errors import MemoryLimitError
from headrace.planner.fit import RUNTIME_BYTES
from headrace.program.kv import KvGroup

MOST_BLOCKS = 2**26


class Memory(NamedTuple):
    """What models and what runs them may have."""

    available: int
    """Bytes in all."""
    to_run: int = RUNTIME_BYTES
    """Of these, bytes that are set aside for what runs them."""
    on_gpu: bool = False
    """Whether they are the GPU's."""


class KvUse(NamedTuple):
    """What a model keeps, and most rows that a sequence has in a step of it."""

    groups: tuple[KvGroup, ...]
    max_rows: int


def size_kv(
    models: Sequence[KvUse],
    config: EngineConfig,
    max_model_len: int,
    weights: int,
    memory: Memory,
    block_size: int = KvConfig.block_size,
) -> list[KvConfig]:
    """The KV of a model, and of a draft that keeps its own beside it, by bytes of weights and the
    memory that there is.

    The layers that see furthest have as many blocks as asked for, else room for `max_num_seqs`
    sequences of full length. Where layers see less far a sequence needs as many blocks at most, and
    no more than its window touches: they have enough for all sequences. What is not asked for takes
    no more than half of what weights and runtime leave, unless one sequence needs more, and where
    that is so there are windows for fewer sequences. Raises MemoryLimitError, with the arithmetic.
    """
    for_one = [
        [group.num_blocks(max_model_len, model.max_rows, block_size) for group in model.groups]
        for model in models
    ]
    widest = max(map(max, for_one))

    def num_blocks(blocks: int, seqs: int) -> list[tuple[int, ...]]:
        return [
            tuple(blocks if one == widest else min(blocks, seqs * one) for one in each)
            for each in for_one
        ]

    def num_bytes(blocks: int, seqs: int) -> int:
        pairs = zip(
            (group for model in models for group in model.groups),
            chain.from_iterable(num_blocks(blocks, seqs)),
            strict=True,
        )
        return sum(count * group.block_bytes(config.kv_dtype, block_size) for group, count in pairs)

    blocks, seqs, left = (
        config.kv_blocks,
        config.max_seqs,
        memory.available - weights - memory.to_run,
    )
    if not blocks:
        in_half = bisect_right(range(1, MOST_BLOCKS), left // 2, key=lambda n: num_bytes(n, seqs))
        blocks = max(widest, min(seqs * widest, in_half))
        seqs = max(
            1, bisect_right(range(1, seqs + 1), left // 2, key=lambda n: num_bytes(blocks, n))
        )
    fitting = bisect_right(range(1, MOST_BLOCKS), left, key=lambda n: num_bytes(n, seqs))
    if blocks <= fitting:
        return [
            KvConfig(counts, block_size, config.kv_dtype) for counts in num_blocks(blocks, seqs)
        ]
    tokens, kv = blocks * block_size, num_bytes(blocks, seqs)
    advice = (
        f"kv_blocks may be {fitting:,}"
        if config.kv_blocks
        else f"set max_model_len to {fitting * block_size:,} or less"
    )
    where, there = ("free on the GPU", "GPU") if memory.on_gpu else ("available", "machine")
    raise MemoryLimitError(
        f"{weights:,} bytes of weights, {kv:,} bytes of KV for {tokens:,} tokens and "
        f"{memory.to_run:,} bytes to run them are "
        f"{weights + kv + memory.to_run:,} bytes, and {memory.available:,} are {where}: "
        f"{advice if fitting else f'the model is too large for this {there}'}"
    )
