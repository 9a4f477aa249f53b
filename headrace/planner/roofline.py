"""Time of a step from bytes and operations: each op takes as long as the slower of memory and
arithmetic (Williams et al. 2009).

The figures are limits: they leave out barriers, activations and everything else that a perfect
kernel would hide.
"""

from headrace.planner.hardware import KINDS, Machine
from headrace.program.op import Kind, Op, StepSize
from headrace.program.ops import Attention
from headrace.program.trace import Program

PREFILL_CHUNK = 512
"""Rows of a prompt in one step, as in `EngineConfig.max_rows` on a CPU."""


def op_kind(op: Op, step: StepSize) -> Kind:
    """The multiply-adds that an op is made of: those of its narrowest format, weights for linear
    ops, KV for attention.
    """
    if isinstance(op, Attention):
        return "f32" if step.kv_bytes >= 4 else "bf16"
    return min((w.kind for w in op.matrices()), key=KINDS.index, default="f32")


def op_seconds(op: Op, step: StepSize, machine: Machine) -> float:
    """Least time of one op in a step."""
    return max(
        op.bytes(step) / machine.bandwidth, op.flops(step) / machine.rates[op_kind(op, step)]
    )


def step_seconds(program: Program, step: StepSize, machine: Machine) -> float:
    """Least time of a step."""
    return sum(op_seconds(op, step, machine) for op in program.ops)


def decode_limit(
    program: Program, machine: Machine, depth: int, kv_bytes: float, seqs: int = 1
) -> float:
    """Most output tokens per second of `sequences` plainly decoding sequences, each with `depth`
    tokens of context.
    """
    step = StepSize(((depth, 1),) * seqs, seqs, kv_bytes)
    return seqs / step_seconds(program, step, machine)


def prefill_limit(program: Program, machine: Machine, tokens: int, kv_bytes: float) -> float:
    """Most prompt tokens per second for one prompt of `tokens` tokens, computed in chunks from an
    empty cache.
    """
    starts = range(0, tokens, PREFILL_CHUNK)
    chunks = ((start, min(PREFILL_CHUNK, tokens - start)) for start in starts)
    seconds = sum(
        step_seconds(program, StepSize((chunk,), 1, kv_bytes), machine) for chunk in chunks
    )
    return tokens / seconds
