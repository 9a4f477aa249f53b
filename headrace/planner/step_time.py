"""The time of a step on a machine: its roofs, and the shares of them that kernels reach.

An op takes a fixed time, and the longer of its bytes and its operations at the shares of
bandwidth and rate that kernels of its kind reach (`reach.toml`, or a calibration of this machine).
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from headrace.planner.hardware import Machine
from headrace.planner.roofline import op_kind
from headrace.program.moe import Experts
from headrace.program.op import Op, StepSize
from headrace.program.ops import Attention, QkvRopeWrite
from headrace.program.trace import Program
from headrace.record import frozen

OpClass = Literal["linear", "qkv", "attention", "experts", "rows"]
Bound = Literal["launch", "memory", "arithmetic", "link"]
_BITS = (4, 8, 16, 32)


@frozen
class Reach:
    """Speed of the kernels of an op, as a fixed time and shares of two roofs."""

    seconds: float
    """Fixed time of a call."""
    bandwidth: float
    """Share of the machine's bandwidth."""
    rate: float
    """Share of the machine's rate."""


@frozen
class Reaches:
    source: str
    """Machine and date of the measurement."""
    table: Mapping[OpClass, Mapping[int, Reach]]
    """By class of op, then by bits of a stored number."""

    def of(self, op: Op, step: StepSize) -> Reach:
        """The entry of an op, or the nearest that the table has."""
        part = class_of(op)
        by_bits = self.table.get(part) or self.table["linear" if part == "experts" else "rows"]
        bits = stored_bits(op, step)
        return by_bits[min(by_bits, key=lambda known: abs(known - bits))]


@frozen
class Link:
    bandwidth: float
    """Bytes/s of one direction."""
    seconds: float
    """Fixed time of an exchange."""


@frozen(kw_only=True)
class ClassTime:
    """Seconds of all ops of a class in one step, and their waits."""

    part: str
    calls: int
    seconds: float
    launch: float
    memory: float
    arithmetic: float
    link: float

    @property
    def bound(self) -> Bound:
        waits: dict[Bound, float] = {
            "launch": self.launch,
            "memory": self.memory,
            "arithmetic": self.arithmetic,
            "link": self.link,
        }
        return max(waits, key=waits.__getitem__)


@cache
def known_reaches(backend: str) -> Reaches | None:
    """The table of a backend; None before any machine of it was measured."""
    path = Path(__file__).parent / "reach.toml"
    entry = tomllib.loads(path.read_text()).get(backend)
    if entry is None:
        return None
    source = entry.pop("source")
    table = {
        part: {int(bits): Reach(**reach) for bits, reach in by_bits.items()}
        for part, by_bits in entry.items()
    }
    return Reaches(source, table)


def class_of(op: Op) -> OpClass:
    if isinstance(op, Attention):
        return "attention"
    if isinstance(op, QkvRopeWrite):
        return "qkv"
    if isinstance(op, Experts):
        return "experts"
    return "linear" if op.matrices() else "rows"


def stored_bits(op: Op, step: StepSize) -> int:
    """Bits of a stored number that an op reads most of, rounded up to a known size."""
    if isinstance(op, Attention):
        bits = 8 * step.kv_bytes
    else:
        matrices = op.matrices()
        numbers = sum(weight.rows * weight.cols for weight in matrices)
        bits = 8 * sum(weight.nbytes for weight in matrices) / numbers if numbers else 32
    # Scales add at most a bit and a half to a number.
    return next((known for known in _BITS if bits <= known * 1.4), _BITS[-1])


def class_times(
    program: Program, step: StepSize, machine: Machine, reaches: Reaches, link: Link | None = None
) -> list[ClassTime]:
    """Times of the classes of ops in a step, the longest first."""
    sums: dict[str, list[float]] = {}
    for op in program.ops:
        reach = reaches.of(op, step)
        memory = op.bytes(step) / (machine.bandwidth * reach.bandwidth)
        arithmetic = op.flops(step) / (machine.rates[op_kind(op, step)] * reach.rate)
        roof, link_bytes = max(memory, arithmetic), op.link_bytes(step)
        exchange = link.seconds + link_bytes / link.bandwidth if link and link_bytes else 0.0
        waits = (
            reach.seconds,
            roof if memory >= arithmetic else 0.0,
            roof if arithmetic > memory else 0.0,
            exchange,
        )
        part = sums.setdefault("exchanges" if link_bytes else class_of(op), [0, 0, 0, 0, 0])
        part[0] += 1
        for index, seconds in enumerate(waits, 1):
            part[index] += seconds
    times = [
        ClassTime(
            part=name,
            calls=int(calls),
            seconds=launch + memory + arithmetic + exchange,
            launch=launch,
            memory=memory,
            arithmetic=arithmetic,
            link=exchange,
        )
        for name, (calls, launch, memory, arithmetic, exchange) in sums.items()
    ]
    return sorted(times, key=lambda time: -time.seconds)


def step_time(
    program: Program, step: StepSize, machine: Machine, reaches: Reaches, link: Link | None = None
) -> float:
    return sum(time.seconds for time in class_times(program, step, machine, reaches, link))
