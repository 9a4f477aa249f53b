"""Speeds of kernels, as shares of a machine's roofs, by class of op and number format.

They are measured on one machine: `reach.toml` has a table for each backend, and
`headrace calibrate --machine` makes one for the machine that it runs on.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal

from headrace.planner.adapter_costs import LowRankProducts
from headrace.program.moe import Experts
from headrace.program.op import Op, StepSize
from headrace.program.ops import Attention, QkvRopeWrite
from headrace.record import frozen

OpClass = Literal["linear", "qkv", "head", "attention", "experts", "adapter", "rows"]
_ALIKE: Mapping[OpClass, OpClass] = {
    "experts": "linear",
    "head": "linear",
    "qkv": "linear",
    "adapter": "linear",
}
"""The class whose entries serve a class without its own."""


@frozen(kw_only=True)
class Reach:
    """Speed of the kernels of an op: a fixed time, shares of two roofs, and further work."""

    seconds: float
    """Fixed time of a call."""
    bandwidth: float
    """Share of the machine's bandwidth."""
    rate: float
    """Share of the machine's rate."""
    unpack: float = 0.0
    """Work of reading and unpacking the weights for a block of rows, in rows."""
    written: float = 0.0
    """Work for each number that is written, in float32 operations."""
    overlap: float = inf
    """Exponent p of the time of both roofs, (memory^p + arithmetic^p)^(1/p). Infinity: the longer
    one hides the other; 1: they follow each other.
    """

    def roof(self, memory: float, arithmetic: float) -> float:
        """Seconds of an op that would need these for either roof alone."""
        longest = max(memory, arithmetic)
        if not longest or self.overlap == inf:
            return longest
        share = min(memory, arithmetic) / longest
        return longest * float((1 + share**self.overlap) ** (1 / self.overlap))


@frozen(kw_only=True)
class HostTime:
    """Seconds of a step apart from its ops."""

    launch: float = 0.0
    """To start the step on the threads."""
    launch_per_sequence: float = 0.0
    engine: float = 0.0
    """To draw and commit the tokens of a launch of plain decoding, one of many in a row."""
    engine_per_sequence: float = 0.0
    schedule: float = 0.0
    """To schedule a step and hand out its tokens, above `engine`: once for launches in a row."""
    request: float = 0.0
    """To receive a request, and to schedule its first step."""


@frozen(kw_only=True)
class Reaches:
    """Speeds of all kernels of a backend."""

    source: str
    """Machine and date of the measurement."""
    table: Mapping[OpClass, Mapping[float, Reach]]
    """By class of op, then by bits of a stored number, scales included."""
    block_rows: int = 0
    """Most rows that a kernel multiplies with weights that it unpacked once; 0: all."""
    host: HostTime = HostTime()

    def of(self, op: Op, step: StepSize) -> Reach:
        """The entry of an op, or the nearest that the table has."""
        part = class_of(op)
        by_bits = self.table.get(part) or self.table[_ALIKE.get(part, "rows")]
        bits = stored_bits(op, step)
        return by_bits[min(by_bits, key=lambda known: abs(known - bits))]

    def num_blocks(self, rows: float) -> int:
        return ceil(rows / self.block_rows) if self.block_rows else 1


@cache
def known_reaches(backend: str) -> Reaches | None:
    """The table of a backend; None before any machine of it was measured."""
    path = Path(__file__).parent / "reach.toml"
    entry = tomllib.loads(path.read_text()).get(backend)
    return None if entry is None else parse_reaches(entry)


def parse_reaches(entry: Mapping[str, Any]) -> Reaches:
    """Read a table as of `reach.toml`. Raises KeyError, TypeError or ValueError."""
    parts: Mapping[OpClass, Mapping[str, Mapping[str, float]]] = entry["classes"]
    table = {
        part: {float(bits): Reach(**reach) for bits, reach in by_bits.items()}
        for part, by_bits in parts.items()
    }
    return Reaches(
        source=entry["source"],
        table=table,
        block_rows=entry.get("block_rows", 0),
        host=HostTime(**entry.get("host", {})),
    )


def class_of(op: Op) -> OpClass:
    if isinstance(op, Attention):
        return "attention"
    if isinstance(op, QkvRopeWrite):
        return "qkv"
    if isinstance(op, Experts):
        return "experts"
    if isinstance(op, LowRankProducts):
        return "adapter"
    if not is_product(op):
        return "rows"
    out = op.output()
    return "head" if out and out.rows == "logit" else "linear"


def is_product(op: Op) -> bool:
    """Whether an op multiplies rows with matrices; embeddings are only copied."""
    return bool(op.matrices()) and bool(op.inputs())


def stored_bits(op: Op, step: StepSize) -> float:
    """Bits of a stored number that an op reads most of, with its share of scales."""
    if isinstance(op, Attention):
        return 8 * step.kv_bytes
    matrices = op.matrices()
    numbers = sum(weight.rows * weight.cols for weight in matrices)
    return 8 * sum(weight.nbytes for weight in matrices) / numbers if numbers else 32.0


def rows_of_product(op: Op, step: StepSize) -> float:
    """Rows that each matrix of an op is multiplied with; of experts, of those that have rows."""
    rows = op.inputs()[0].num_rows(step)
    if isinstance(op, Experts):
        return rows * op.top_k / op.distinct_experts(rows)
    return rows


def written_numbers(op: Op, step: StepSize) -> int:
    """Numbers that an op writes, before an activation halves them."""
    out = op.output()
    if out is None:
        return 0
    width = out.width
    if is_product(op) and not isinstance(op, Experts):
        width = sum(weight.rows for weight in op.matrices())
    elif isinstance(op, Experts):
        width = op.top_k * (op.gate[0].rows + op.up[0].rows + op.down[0].rows)
    return width * out.num_rows(step)
