"""Minimum time of a step: the longer time of each op's bytes and operations.

A perfect kernel would hide everything else (Williams et al. 2009).
"""

from headrace.planner.hardware import KINDS, Machine
from headrace.program.op import Kind, Op, StepSize
from headrace.program.ops import Attention
from headrace.program.trace import Program

PREFILL_CHUNK = 512
"""Rows of a prompt in one step, as with `EngineConfig.max_rows` on a CPU."""


def op_kind(op: Op, step: StepSize) -> Kind:
    """Format of an op's multiply-adds: its narrowest weights, or KV."""
    if isinstance(op, Attention):
        return "f32" if step.kv_bytes >= 4 else "bf16"
    return min((w.kind for w in op.matrices()), key=KINDS.index, default="f32")


def op_seconds(op: Op, step: StepSize, machine: Machine) -> float:
    return max(
        op.bytes(step) / machine.bandwidth, op.flops(step) / machine.rates[op_kind(op, step)]
    )


def step_seconds(program: Program, step: StepSize, machine: Machine) -> float:
    return sum(op_seconds(op, step, machine) for op in program.ops)


def decode_limit(
    program: Program, machine: Machine, depth: int, kv_bytes: float, seqs: int = 1
) -> float:
    """Maximum output tokens/s of `seqs` sequences at `depth` tokens."""
    step = StepSize(((depth, 1),) * seqs, seqs, kv_bytes)
    return seqs / step_seconds(program, step, machine)


def prefill_limit(program: Program, machine: Machine, tokens: int, kv_bytes: float) -> float:
    """Maximum prompt tokens/s of one prompt in chunks."""
    starts = range(0, tokens, PREFILL_CHUNK)
    chunks = ((start, min(PREFILL_CHUNK, tokens - start)) for start in starts)
    seconds = sum(
        step_seconds(program, StepSize((chunk,), 1, kv_bytes), machine) for chunk in chunks
    )
    return tokens / seconds
