"""Divides the memory of the machine or its GPU between weights, runtime and KV."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import MemoryLimitError
from headrace.loader.drafts import DraftCheckpoints
from headrace.loader.kv_size import KvUse, Memory, size_kv
from headrace.parallel.config import is_multi_host, mesh_of, rank_programs
from headrace.planner.gpu import free_memory_of
from headrace.planner.host import available_memory
from headrace.program.trace import Program

_LOGIT_BYTES = 64 << 20
_MIN_LOGIT_ROWS = 64
_MIN_CONTEXT = 1024
"""Fewest tokens that a context shrinks to, to fit on a GPU."""


class Fitted(NamedTuple):
    """KV sizes of the model and of its draft model, and the memory that they fit in."""

    kv: KvConfig
    draft_kv: KvConfig | None
    memory: Memory
    """Of rank 0."""


class MaxRows(NamedTuple):
    """Maximum size of a step."""

    rows: int
    logit_rows: int


def default_logit_rows(vocab_size: int) -> int:
    """Return the value that replaces an `EngineConfig.max_logit_rows` of 0."""
    return max(_MIN_LOGIT_ROWS, _LOGIT_BYTES // (4 * vocab_size))


def step_rows(config: EngineConfig, vocab_size: int) -> MaxRows:
    """Return the maximum rows and logit rows of a step of the target model."""
    logit_rows = config.max_seqs + (config.max_logit_rows or default_logit_rows(vocab_size))
    return MaxRows(config.max_rows, min(config.max_rows, logit_rows))


def draft_rows(config: EngineConfig, target: MaxRows) -> MaxRows:
    """Return the maximum rows and logit rows of a step of a draft model.

    A step drafts below `draft_width` nodes of each sequence, and computes their ancestors again.
    """
    logit_rows = min(target.rows, config.max_seqs * config.draft_width)
    depth = config.draft_depth - 1 if config.draft_width > 1 else 1
    return MaxRows(min(target.rows, logit_rows * max(1, depth)), logit_rows)


def memory_for(config: EngineConfig, program: Program, gpu: int = 0) -> Memory:
    """Return the memory that the backend can use for a program lowered for it.

    `gpu` is the number of the GPU on this machine.
    """
    if config.traits.on_gpu:
        from headrace.backend.cuda.host_blocks import staging_bytes
        from headrace.backend.cuda.memory import free_memory, run_bytes

        free = free_memory()
        if free is not None:
            if gpu:
                free = free_memory_of(gpu) or free
            rows = step_rows(config, program.logits.width if program.logits else 1)
            runtime = run_bytes(program, config.kv_format, *rows)
            if config.kv_offload_bytes and config.prefix_cache:
                block_size = config.traits.kv_block_size
                runtime += staging_bytes(
                    [group.block_bytes(config.kv_format, block_size) for group in program.kv_groups]
                )
            return Memory(free, runtime, on_gpu=True)
    return Memory(available_memory())


def fit_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    program: Program,
    drafts: DraftCheckpoints,
    max_model_len: int,
) -> Fitted:
    """Return the KV sizes of the model and of its draft model, next to all weights.

    Ranks of one machine share its memory, and each has a GPU of its own, so there the rank with
    the least room decides. With ranks on several machines, this machine must fit the largest
    rank. The function reads no weights. Raises MemoryLimitError if they do not fit.
    """
    programs = rank_programs(config, program, checkpoint.tensors)
    block_size = config.traits.kv_block_size

    def kv_bytes(use: KvUse) -> int:
        return sum(group.block_bytes(config.kv_format, block_size) for group in use.groups)

    rank_weights = [shard.weight_bytes for shard in programs]
    uses = [KvUse(shard.kv_groups, config.max_rows) for shard in programs]
    draft_weights = drafts.weight_bytes(config.backend, checkpoint, mesh_of(config).ranks)
    draft_use = drafts.kv_use(config)
    draft_uses = [draft_use] if draft_use else []
    draft_kv: KvConfig | None = None

    mesh, memory = mesh_of(config), memory_for(config, programs[0])
    if memory.on_gpu and mesh.ranks > 1:
        kvs: list[KvConfig] = []
        for rank, (use, weights) in enumerate(zip(uses, rank_weights, strict=True)):
            gpu = 0 if is_multi_host(mesh) else rank
            kv, *others = size_kv(
                [use] if rank else [use, *draft_uses],  # rank 0 runs the draft model
                config,
                max_model_len,
                weights if rank else weights + draft_weights,
                memory_for(config, programs[rank], gpu) if rank else memory,
                block_size,
            )
            draft_kv = draft_kv if rank else (others[0] if others else None)
            kvs.append(kv)
        return Fitted(_fewest_blocks(kvs), draft_kv, memory)

    if is_multi_host(mesh):
        weights, uses = max(rank_weights), [max(uses, key=kv_bytes)]
    else:
        weights = sum(rank_weights)
    kv, *others = size_kv(
        [*uses, *draft_uses],
        config,
        max_model_len,
        weights + draft_weights,
        memory,
        block_size,
    )
    return Fitted(kv, others[-1] if draft_use else None, memory)


def _fewest_blocks(kvs: Sequence[KvConfig]) -> KvConfig:
    """Return the KV size that fits on all ranks: they have equal block tables."""
    blocks = zip(*(kv.num_blocks for kv in kvs), strict=True)
    return replace(kvs[0], num_blocks=tuple(map(min, blocks)))


def fit_context(
    config: EngineConfig, checkpoint: Checkpoint, program: Program, drafts: DraftCheckpoints
) -> int:
    """Return the context in tokens: `max_model_len`, or the model's if it fits, or on a GPU the
    longest that fits.

    Raises MemoryLimitError if not even a short context fits.
    """
    context = config.max_model_len or checkpoint.spec.max_context

    def fits(max_model_len: int) -> bool:
        try:
            fit_memory(config, checkpoint, program, drafts, max_model_len)
        except MemoryLimitError:
            return False
        return True

    if config.max_model_len or config.kv_blocks or not config.traits.on_gpu or fits(context):
        fit_memory(config, checkpoint, program, drafts, context)
        return context
    block_size = config.traits.kv_block_size
    lengths = range(_MIN_CONTEXT, context, block_size)
    fitting = bisect_left(lengths, True, key=lambda length: not fits(length))
    if not fitting:
        fit_memory(config, checkpoint, program, drafts, context)
    return lengths[fitting - 1]
