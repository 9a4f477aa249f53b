"""Memory of a run of a model on this machine's CPU, counted before the run."""

from headrace import _native
from headrace.backend import instructions
from headrace.backend.cpu.memory import activation_bytes, low_rank_bytes
from headrace.backend_traits import KvDtype, traits_of
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.loader.kv_size import KvUse, Memory, size_kv
from headrace.planner.calibration import stored_calibration
from headrace.planner.memory import (
    SHIPPED_PROCESS,
    ProcessMemory,
    RunMemory,
    packing_bytes,
    resident_weights,
    used_kv,
    whole_pages,
)
from headrace.planner.steps import start_steps
from headrace.program.adapter import Adapter, low_rank_part
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


def this_process() -> ProcessMemory:
    """The memory of a process by the stored calibration, else as measured elsewhere."""
    stored = stored_calibration()
    return stored.process if stored else SHIPPED_PROCESS


def run_memory(
    checkpoint: Checkpoint,
    program: Program,
    process: ProcessMemory,
    *,
    kv_dtype: KvDtype,
    prompt: int,
    output: int,
    batch: int,
    memory: int,
    max_model_len: int = 0,
    adapter: Adapter | None = None,
) -> RunMemory:
    """Count the resident bytes of `LLM` with `batch` requests that start together.

    `program` is lowered for the `cpu` backend. `memory`: free bytes before the model is loaded.
    `max_model_len`: as in `EngineConfig`. All requests have the adapter.
    """
    traits = traits_of("cpu")
    count = activation_bytes(
        program, checkpoint.tensors, kv_dtype, instructions("cpu"), adapter is not None
    )
    low_rank = low_rank_part(adapter) if adapter else {}
    return RunMemory(
        weights=resident_weights(program) + sum(map(low_rank_bytes, low_rank.values())),
        kv_groups=used_kv(
            program.kv_groups,
            kv_dtype,
            prompt + output,
            batch,
            traits.kv_block_size,
        ),
        kv_ahead=_kv_ahead(program, kv_dtype, memory, max_model_len or checkpoint.spec.max_context),
        activations=whole_pages(count(_largest(program, kv_dtype, prompt, batch))),
        base=process.base,
        tokenizer=round(process.per_token * checkpoint.spec.vocab_size),
        converted=sum(
            tensor.nbytes
            for tensor in checkpoint.tensors.values()
            if not tensor.is_mapped and not _is_dummy(tensor)
        ),
        packing=packing_bytes(program, {t.name: t.nbytes for t in checkpoint.tensors.values()}),
    )


def _kv_ahead(program: Program, kv_dtype: KvDtype, memory: int, max_model_len: int) -> int:
    """Bytes of KV that an engine with default options keeps resident ahead of its blocks in use."""
    config = EngineConfig(backend="cpu", kv_dtype=kv_dtype)
    use = KvUse(program.kv_groups, config.max_rows)
    [kv] = size_kv([use], config, max_model_len, program.weight_bytes, Memory(memory))
    return sum(
        _native.kv_bytes_ahead(count * group.block_bytes(kv_dtype, kv.block_size))
        for count, group in zip(kv.num_blocks, program.kv_groups, strict=True)
    )


def _largest(program: Program, kv_dtype: KvDtype, prompt: int, batch: int) -> StepSize:
    """The rows that fit in the buffers, which grow at least twofold."""
    max_rows = traits_of("cpu").max_num_batched_tokens
    kv_bytes = number_bytes(program.kv_groups, kv_dtype)
    rows = logit_rows = 0
    for step in start_steps(prompt, batch, max_rows, kv_bytes):
        rows = _grown(rows, step.rows)
        logit_rows = _grown(logit_rows, step.logit_rows)
    return StepSize(((0, rows),), logit_rows, kv_bytes)


def _grown(rows: int, needed: int) -> int:
    return rows if needed <= rows else max(needed, 2 * rows)


def _is_dummy(tensor: StoredTensor) -> bool:
    """Whether a tensor of a `config.json` stands for one in a file."""
    codes = tensor.parts["codes"]
    return codes.size > 0 and not any(codes.strides)
