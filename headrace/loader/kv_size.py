"""Sizes the KV cache: as many blocks as the sequences can need, within the free memory."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from headrace.config import EngineConfig, KvConfig
from headrace.errors import MemoryLimitError
from headrace.planner.fit import RUNTIME_BYTES
from headrace.program.kv import KvGroup

MAX_BLOCKS = 2**26
_GPU_SHARE, _MACHINE_SHARE = 0.9, 0.5


class Memory(NamedTuple):
    """Memory of the machine, or of its GPU."""

    available: int  # bytes
    runtime: int = RUNTIME_BYTES
    """Bytes reserved for everything except weights and KV."""
    on_gpu: bool = False

    @property
    def kv_share(self) -> float:
        return kv_share(on_gpu=self.on_gpu)


def kv_share(*, on_gpu: bool) -> float:
    """Max share of the memory next to weights that KV takes by default.

    Other programs need the machine's memory, and none needs the GPU's.
    """
    return _GPU_SHARE if on_gpu else _MACHINE_SHARE


class KvUse(NamedTuple):
    """KV groups of a model, and the maximum rows of one sequence in a step."""

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
    """Return one KV size per entry of `models`: each rank of the target, then the draft model.

    The KV groups with the widest window get `kv_blocks` blocks, or enough for
    `max_num_seqs` sequences of full length. A group with a narrower window gets the
    blocks that all sequences can touch in it. Unless `kv_blocks` is set, KV takes at
    most `memory.kv_share` of the memory that `weights` (bytes) and the runtime leave, but
    always enough for one sequence; then narrow groups have room for fewer sequences.
    Raises MemoryLimitError, with the arithmetic, if KV does not fit.
    """
    seq_blocks = [
        [group.num_blocks(max_model_len, model.max_rows, block_size) for group in model.groups]
        for model in models
    ]
    widest = max(map(max, seq_blocks))

    def num_blocks(blocks: int, seqs: int) -> list[tuple[int, ...]]:
        return [
            tuple(blocks if count == widest else min(blocks, seqs * count) for count in counts)
            for counts in seq_blocks
        ]

    def num_bytes(blocks: int, seqs: int) -> int:
        groups = (group for model in models for group in model.groups)
        counts = chain.from_iterable(num_blocks(blocks, seqs))
        return sum(
            count * group.block_bytes(config.kv_format, block_size)
            for group, count in zip(groups, counts, strict=True)
        )

    def max_blocks(limit: int, seqs: int) -> int:
        return bisect_right(range(1, MAX_BLOCKS), limit, key=lambda n: num_bytes(n, seqs))

    blocks, seqs = config.kv_blocks, config.max_seqs
    free = memory.available - weights - memory.runtime
    if not blocks:
        most = int(free * memory.kv_share)
        blocks = max(widest, min(seqs * widest, max_blocks(most, seqs)))
        fitting_seqs = bisect_right(range(1, seqs + 1), most, key=lambda n: num_bytes(blocks, n))
        seqs = max(1, fitting_seqs)

    fitting = max_blocks(free, seqs)
    if blocks > fitting:
        kv = num_bytes(blocks, seqs)
        raise _memory_error(config, weights, kv, blocks * block_size, memory, fitting, block_size)
    return [KvConfig(counts, block_size, config.kv_format) for counts in num_blocks(blocks, seqs)]


def _memory_error(
    config: EngineConfig,
    weights: int,
    kv: int,
    tokens: int,
    memory: Memory,
    fitting: int,
    block_size: int,
) -> MemoryLimitError:
    """Make the error for KV of `kv` bytes, if only `fitting` blocks fit."""
    device = "GPU" if memory.on_gpu else "machine"
    if not fitting:
        advice = f"the model is too large for this {device}"
    elif config.kv_blocks:
        advice = f"set kv_blocks to {fitting:,} or less"
    else:
        advice = f"set max_model_len to {fitting * block_size:,} or less"
    return MemoryLimitError(
        f"{weights:,} bytes of weights, {kv:,} bytes of KV for {tokens:,} tokens and "
        f"{memory.runtime:,} bytes of runtime are {weights + kv + memory.runtime:,} bytes, but "
        f"{memory.available:,} are {'free on the GPU' if memory.on_gpu else 'available'}; {advice}"
    )
