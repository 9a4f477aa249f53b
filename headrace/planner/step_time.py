"""The time of a step on a machine, by its roofs and the shares of them that kernels reach.

An op takes a fixed time, and the time of its bytes and operations at the shares of bandwidth and
rate that kernels of its class reach (`reach.py`). A step takes some time of the host, too.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

from headrace.planner.hardware import Machine
from headrace.planner.reach import (
    Reach,
    Reaches,
    class_of,
    is_product,
    known_reaches,
    rows_of_product,
    written_numbers,
)
from headrace.planner.roofline import op_kind
from headrace.program.collective import Receive
from headrace.program.op import Op, RowKind, StepSize, Value, Weight
from headrace.program.ops import Attention
from headrace.program.trace import Program
from headrace.record import frozen

__all__ = ["Bound", "ClassTime", "Link", "Reaches", "StepTimer", "known_reaches"]

Bound = Literal["launch", "memory", "arithmetic", "link"]
HOST = "host"
"""Part of a step outside of all ops."""
_MAX_KEPT = 4096
"""Sizes of steps whose costs are kept; a server asks for ever new ones."""


@frozen
class Link:
    bandwidth: float
    """Bytes/s of one direction."""
    seconds: float
    """Fixed time of an exchange."""
    between_stages: "Link | None" = None
    """The link of a pipeline's stages, if they have another."""

    def of(self, op: Op) -> "Link":
        return self.between_stages or self if isinstance(op, Receive) else self


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


class StepTimer:
    """Predicts the time of steps through the stages of a pipeline; one device has one stage.

    Ops with equal costs are counted once. Costs that depend on numbers of rows alone are kept.
    The host's time counts once a step, with the first stage.
    """

    def __init__(
        self,
        stages: Sequence[Program],
        machine: Machine,
        reaches: Reaches,
        link: Link | None = None,
    ) -> None:
        self._stages = [_StageTimer(stage, machine, reaches, link) for stage in stages]
        self._host = reaches.host

    @property
    def request_seconds(self) -> float:
        """Seconds of the host for a new request, apart from its steps."""
        return self._host.request

    def seconds(self, step: StepSize) -> float:
        """Seconds of a step through all stages, with the host's time."""
        return sum(self.stage_seconds(step))

    def launch_seconds(self, step: StepSize) -> float:
        """Seconds of a step of an executable, without the engine around it."""
        return sum(self.launch_stages(step))

    @property
    def schedule_seconds(self) -> float:
        """Seconds of the engine for a step, however many launches of plain decoding it has."""
        return self._host.schedule

    def engine_seconds(self, step: StepSize) -> float:
        """Seconds of the engine for each launch of a step, around the executable."""
        return self._host.engine + self._host.engine_per_sequence * len(step.seqs)

    def launch_stages(self, step: StepSize) -> tuple[float, ...]:
        """Seconds of each stage of an executable, without the engine around it."""
        first, *others = (stage.seconds(step) for stage in self._stages)
        return first + self._start_seconds(step), *others

    def stage_seconds(self, step: StepSize) -> tuple[float, ...]:
        """Seconds of each stage."""
        first, *others = self.launch_stages(step)
        return first + self.engine_seconds(step), *others

    def slowest(self, step: StepSize) -> int:
        """Number of the slowest stage."""
        seconds = self.stage_seconds(step)
        return seconds.index(max(seconds))

    def class_times(self, step: StepSize) -> list[ClassTime]:
        """Times of the classes of ops in the slowest stage, and of the host, the longest first."""
        slowest = self.slowest(step)
        times = self._stages[slowest].class_times(step)
        host = self._start_seconds(step) + self.engine_seconds(step)
        if host and slowest == 0:
            times.append(_time_of(HOST, 1, _Waits(host, 0.0, 0.0, 0.0)))
        return sorted(times, key=lambda time: -time.seconds)

    def _start_seconds(self, step: StepSize) -> float:
        return self._host.launch + self._host.launch_per_sequence * len(step.seqs)

    def op_seconds(self, step: StepSize, stage: int) -> dict[str, float]:
        """Seconds of all ops of a name, as in a profile."""
        return self._stages[stage].op_seconds(step)


class _Waits(NamedTuple):
    """Seconds by the part of a machine that an op waits for."""

    launch: float
    memory: float
    arithmetic: float
    link: float


def _time_of(part: str, calls: int, waits: _Waits) -> ClassTime:
    return ClassTime(
        part=part,
        calls=calls,
        seconds=sum(waits),
        launch=waits.launch,
        memory=waits.memory,
        arithmetic=waits.arithmetic,
        link=waits.link,
    )


class _Equals(NamedTuple):
    """Ops of a program with equal costs."""

    op: Op
    calls: int
    part: str


def equal_ops(program: Program) -> list[tuple[Op, int]]:
    """One op of each cost, and the number of ops with this cost."""
    by_cost: dict[Hashable, list[Op]] = {}
    for op in program.ops:
        by_cost.setdefault(_cost_key(op), []).append(op)
    return [(ops[0], len(ops)) for ops in by_cost.values()]


class _StageTimer:
    """Predicts the time of steps of one program."""

    def __init__(
        self, program: Program, machine: Machine, reaches: Reaches, link: Link | None
    ) -> None:
        self._machine, self._reaches, self._link = machine, reaches, link
        one_row = StepSize(((0, 1),), 1, 2.0)
        equals = [
            _Equals(op, calls, "exchanges" if op.link_bytes(one_row) else class_of(op))
            for op, calls in equal_ops(program)
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
        return [
            _time_of(part, int(calls), _Waits(*waits)) for part, (calls, *waits) in sums.items()
        ]

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
            if len(self._kept) == _MAX_KEPT:
                self._kept.clear()
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
        machine, link = self._machine, self._link and self._link.of(op)
        reach, rate = self._speed(op, step)
        memory = op.bytes(step) / (machine.bandwidth * reach.bandwidth)
        arithmetic = self._row_share(op, step, reach.unpack) * op.flops(step) / rate
        if reach.written:
            arithmetic += reach.written * written_numbers(op, step) / machine.rates["f32"]
        roof, link_bytes = reach.roof(memory, arithmetic), op.link_bytes(step)
        return _Waits(
            launch=reach.seconds,
            memory=roof if memory >= arithmetic else 0.0,
            arithmetic=roof if arithmetic > memory else 0.0,
            link=link.seconds + link_bytes / link.bandwidth if link and link_bytes else 0.0,
        )

    def _speed(self, op: Op, step: StepSize) -> tuple[Reach, float]:
        """The reach of an op and its operations/s, which depend on the format of KV alone."""
        key = id(op), step.kv_bytes
        if key not in self._speeds:
            reach = self._reaches.of(op, step)
            self._speeds[key] = reach, self._machine.rates[op_kind(op, step)] * reach.rate
        return self._speeds[key]

    def _row_share(self, op: Op, step: StepSize, unpack: float) -> float:
        """Work of an op with that of unpacking its weights, over the work of its rows."""
        if not unpack or not is_product(op):
            return 1.0
        rows = rows_of_product(op, step)
        return 1 + unpack * self._reaches.num_blocks(rows) / rows


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
