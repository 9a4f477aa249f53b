"""Memory of the GPU backend apart from weights and KV, on a GPU that need not be at hand."""

from headrace.backend.cuda.architecture import Architecture
from headrace.backend.cuda.attention_tiles import tiles_for
from headrace.backend.cuda.step_memory import step_bytes
from headrace.backend.cuda.step_shape import prefill
from headrace.backend_traits import KvDtype
from headrace.config import EngineConfig
from headrace.loader.memory import step_rows
from headrace.planner.adapter_costs import RANK_TILE
from headrace.planner.hardware import Machine
from headrace.program.adapter import LowRank
from headrace.program.trace import Program

CUDA_CONTEXT_BYTES = 512 << 20
"""Bytes that the driver keeps for a process. An estimate: no GPU was asked for it."""


def gpu_low_rank_bytes(matrices: LowRank) -> int:
    """Bytes of the low-rank matrices for a weight, in bf16 and in whole tiles of ranks."""
    (rank, cols), rows = matrices.down.shape, len(matrices.up)
    total: int = 2 * -(-rank // RANK_TILE) * RANK_TILE * (cols + rows)
    return total


def gpu_runtime_bytes(program: Program, machine: Machine, kv_dtype: KvDtype) -> int:
    """Bytes of the context, of the values and scratch of the largest step, and of kernels.

    `program` is lowered for `cuda`. Sizes of steps are the defaults of `EngineConfig`.
    """
    rows = step_rows(EngineConfig(backend="cuda"), program.logits.width if program.logits else 1)
    gpu, shape = _architecture(machine), prefill(*rows)
    return CUDA_CONTEXT_BYTES + step_bytes(
        program, shape, lambda group: tiles_for(group, kv_dtype, gpu, shape.is_prefill)
    )


def _architecture(machine: Machine) -> Architecture:
    """The GPU of a machine file, such as `sm_90`; tiles do not depend on its shared memory."""
    number = machine.isa.removeprefix("sm_")
    is_nvidia = number.isdigit()
    capability = (int(number[:-1]), int(number[-1])) if is_nvidia else (0, 0)
    return Architecture(capability, machine.threads, shared_bytes=0, has_ptx=is_nvidia)
