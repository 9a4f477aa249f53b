"""The time of a step on a machine: its roofs, and the shares of them that kernels reach.

An op takes a fixed time, and the longer of its bytes and its operations at the shares of
bandwidth and rate that kernels of its kind reach (`reach.toml`, or a calibration of this machine).
"""

import tomllib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.planner.hardware import Machine
from headrace.planner.roofline import op_kind
from headrace.program.moe import Experts
from headrace.program.op import Op, RowKind, StepSize, Value, Weight
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


class StepTimer:
    """Predicts the time of steps through the stages of a pipeline; one device has one stage.

    Ops with equal costs are counted once. Costs that depend on numbers of rows alone are kept.
    """

    def __init__(
        self,
        stages: Sequence[Program],
        machine: Machine,
        reaches: Reaches,
        link: Link | None = None,
    ) -> None:
        self._stages = [_StageTimer(stage, machine, reaches, link) for stage in stages]

    def seconds(self, step: StepSize) -> float:
        """Seconds of a step through all stages."""
        return sum(stage.seconds(step) for stage in self._stages)

    def stage_seconds(self, step: StepSize) -> tuple[float, ...]:
        """Seconds of each stage."""
        return tuple(stage.seconds(step) for stage in self._stages)

    def slowest(self, step: StepSize) -> int:
        """Number of the slowest stage."""
        seconds = self.stage_seconds(step)
        return seconds.index(max(seconds))

    def class_times(self, step: StepSize) -> list[ClassTime]:
        """Times of the classes of ops in the slowest stage, the longest first."""
        return self._stages[self.slowest(step)].class_times(step)

    def op_seconds(self, step: StepSize, stage: int) -> dict[str, float]:
        """Seconds of all ops of a name, as in a profile."""
        return self._stages[stage].op_seconds(step)


class _Waits(NamedTuple):
    """Seconds by the part of a machine that an op waits for."""

    launch: float
    memory: float
    arithmetic: float
    link: float


class _Equals(NamedTuple):
    """Ops of a program with equal costs."""

    op: Op
    calls: int
    part: str


class _StageTimer:
    """Predicts the time of steps of one program."""

    def __init__(
        self, program: Program, machine: Machine, reaches: Reaches, link: Link | None
    ) -> None:
        self._machine, self._reaches, self._link = machine, reaches, link
        one_row = StepSize(((0, 1),), 1, 2.0)
        by_cost: dict[Hashable, list[Op]] = {}
        for op in program.ops:
            by_cost.setdefault(_cost_key(op), []).append(op)
        equals = [
            _Equals(
                ops[0], len(ops), "exchanges" if ops[0].link_bytes(one_row) else class_of(ops[0])
            )
            for ops in by_cost.values()
        ]
        self._attention = [one for one in equals if isinstance(one.op, Attention)]
        # Most ops depend on the rows of a step alone, and the head on the logit rows.
        others = [one for one in equals if not isinstance(one.op, Attention)]
        self._of_rows = [one for one in others if _row_kinds(one.op) == {"step"}]
        self._of_gathered = [one for one in others if _row_kinds(one.op) != {"step"}]
        self._kept: dict[Hashable, tuple[float, dict[str, list[float]]]] = {}
        self._speeds: dict[tuple[int, float], tuple[Reach, float]] = {}

    def seconds(self, step: StepSize) -> float:
        return sum(seconds for seconds, _ in self._pieces(step))

    def class_times(self, step: StepSize) -> list[ClassTime]:
        sums: dict[str, list[float]] = {}
        for _, by_part in self._pieces(step):
            for part, waits in by_part.items():
                known = sums.setdefault(part, [0.0] * len(waits))
                known[:] = map(sum, zip(known, waits, strict=True))
        times = [
            ClassTime(
                part=part,
                calls=int(calls),
                seconds=launch + memory + arithmetic + exchange,
                launch=launch,
                memory=memory,
                arithmetic=arithmetic,
                link=exchange,
            )
            for part, (calls, launch, memory, arithmetic, exchange) in sums.items()
        ]
        return sorted(times, key=lambda time: -time.seconds)

    def op_seconds(self, step: StepSize) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for op, calls, _ in (*self._of_rows, *self._of_gathered, *self._attention):
            seconds[op.name] = seconds.get(op.name, 0.0) + calls * sum(self._waits(op, step))
        return seconds

    def _pieces(self, step: StepSize) -> Iterator[tuple[float, dict[str, list[float]]]]:
        """Seconds, and calls and waits by part, of three groups of ops."""
        rows = step.rows
        yield self._keep(self._of_rows, rows, step)
        yield self._keep(self._of_gathered, (rows, step.logit_rows, step.pooled_rows), step)
        yield self._sum(self._attention, step)

    def _keep(
        self, equals: list[_Equals], key: Hashable, step: StepSize
    ) -> tuple[float, dict[str, list[float]]]:
        key = key, step.kv_bytes
        if key not in self._kept:
            self._kept[key] = self._sum(equals, step)
        return self._kept[key]

    def _sum(self, equals: list[_Equals], step: StepSize) -> tuple[float, dict[str, list[float]]]:
        total, by_part = 0.0, dict[str, list[float]]()
        for op, calls, part in equals:
            waits = self._waits(op, step)
            total += calls * sum(waits)
            sums = by_part.setdefault(part, [0.0] * (1 + len(waits)))
            sums[0] += calls
            for index, seconds in enumerate(waits, 1):
                sums[index] += calls * seconds
        return total, by_part

    def _waits(self, op: Op, step: StepSize) -> _Waits:
        """Waits of one call; an op without rows does not run."""
        out = op.output()
        if out and not out.num_rows(step):
            return _Waits(0.0, 0.0, 0.0, 0.0)
        machine, link = self._machine, self._link
        reach, rate = self._speed(op, step)
        memory = op.bytes(step) / (machine.bandwidth * reach.bandwidth)
        arithmetic = op.flops(step) / rate
        link_bytes = op.link_bytes(step)
        return _Waits(
            launch=reach.seconds,
            memory=memory if memory >= arithmetic else 0.0,
            arithmetic=arithmetic if arithmetic > memory else 0.0,
            link=link.seconds + link_bytes / link.bandwidth if link and link_bytes else 0.0,
        )

    def _speed(self, op: Op, step: StepSize) -> tuple[Reach, float]:
        """The reach of an op and its operations/s, which depend on the format of KV alone."""
        key = id(op), step.kv_bytes
        if key not in self._speeds:
            reach = self._reaches.of(op, step)
            self._speeds[key] = reach, self._machine.rates[op_kind(op, step)] * reach.rate
        return self._speeds[key]


def _cost_key(op: Op) -> Hashable:
    """All of an op but names, numbers and layers: ops with equal keys cost the same."""
    fields = ((name, _size(value)) for name, value in vars(op).items() if name != "layer")
    return type(op), tuple(fields)


def _size(field: object) -> Hashable:
    match field:
        case Weight():
            return field.rows, field.cols, field.nbytes, field.kind
        case Value():
            return field.width, field.rows
        case tuple():
            return tuple(map(_size, field))
        case _:
            return field


def _row_kinds(op: Op) -> set[RowKind]:
    out = op.output()
    return {value.rows for value in (*op.inputs(), *([out] if out else []))}
