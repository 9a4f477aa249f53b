"""What of a machine's memory, or of its GPU's, a model may have, and how it is shared out: weights,
what runs them, KV.
"""

from typing import NamedTuple

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.loader.drafts import DraftCheckpoints, own_program
from headrace.loader.kv_size import KvUse, Memory, size_kv
from headrace.parallel.config import is_multi_host, mesh_of, rank_programs
from headrace.planner.host import available_memory
from headrace.program.trace import Program
from headrace.speculation.proposers.draft_model import max_rows

_LOGIT_BYTES = 64 << 20
_LEAST_LOGIT_ROWS = 64


class MostRows(NamedTuple):
    """How large the steps of an engine can be."""

    rows: int
    logit_rows: int


def most_logit_rows(vocab_size: int) -> int:
    """`EngineConfig.max_logit_rows` where that is 0."""
    return max(_LEAST_LOGIT_ROWS, _LOGIT_BYTES // (4 * vocab_size))


def step_rows(config: EngineConfig, vocab_size: int) -> MostRows:
    """Most rows of a step, and most of them with logits: one for each sequence, and those of drafts
    and of prompts.
    """
    logit_rows = config.max_seqs + (config.max_logit_rows or most_logit_rows(vocab_size))
    return MostRows(config.max_rows, min(config.max_rows, logit_rows))


def draft_rows(config: EngineConfig, rows: MostRows) -> MostRows:
    """The same of a model that drafts for it: at each depth it has the likeliest tokens of each
    sequence, all of them with logits.
    """
    of_drafts = min(rows.rows, config.max_seqs * config.draft_width)
    return MostRows(of_drafts, of_drafts)


def memory_for(config: EngineConfig, program: Program) -> Memory:
    """The memory that a backend, which is named in `config`, has for a program that was lowered for
    it.
    """
    if config.traits.on_gpu:
        from headrace.backend.cuda.host_blocks import staging_bytes
        from headrace.backend.cuda.memory import free_memory, run_bytes

        free = free_memory()
        if free is not None:
            assert program.logits
            rows = step_rows(config, program.logits.width)
            to_run = run_bytes(program, config.kv_dtype, *rows)
            if config.kv_offload_bytes and config.prefix_cache:
                to_run += staging_bytes(
                    [
                        group.block_bytes(config.kv_dtype, config.traits.kv_block_size)
                        for group in program.kv_groups
                    ]
                )
            return Memory(free, to_run, on_gpu=True)
    return Memory(available_memory())


def fit_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    program: Program,
    draft_checkpoints: DraftCheckpoints,
    max_model_len: int,
) -> tuple[KvConfig, KvConfig | None]:
    """The KV of a model, which runs this program, and of its draft model, beside the weights of all
    that runs, as the backend holds them.

    Ranks on this machine share its memory; of those that are spread over several, this one is to
    hold the largest. No weight is read. Raises MemoryLimitError where they do not fit in the memory
    that is available.
    """
    programs = rank_programs(config, program, checkpoint.tensors)
    spread = is_multi_host(mesh_of(config))
    shares = [own.weight_bytes for own in programs]
    weights = (max(shares) if spread else sum(shares)) + draft_checkpoints.weight_bytes(
        config.backend, checkpoint.spec
    )
    block_size = config.traits.kv_block_size
    uses = [KvUse(own.kv_groups, config.max_rows) for own in programs]
    if spread:
        uses = [
            max(
                uses,
                key=lambda use: sum(
                    group.block_bytes(config.kv_dtype, block_size) for group in use.groups
                ),
            )
        ]
    if draft := draft_checkpoints.draft:
        uses.append(KvUse(own_program(config, draft).kv_groups, max_rows(config.draft_depth)))
    kv, *others = size_kv(
        uses, config, max_model_len, weights, memory_for(config, programs[0]), block_size
    )
    return kv, others[-1] if draft else None
