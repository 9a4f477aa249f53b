"""Time of each op in a phase, next to its roofline limit (Williams et al. 2009)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

from headrace.batch import StepTimes
from headrace.planner.hardware import Machine
from headrace.planner.roofline import PREFILL_CHUNK, op_kind, op_seconds
from headrace.program.op import Kind, Op, StepSize
from headrace.program.trace import Program
from headrace.record import frozen

Bound = Literal["memory", "arithmetic", "link", "latency", "neither", "unknown"]

_SHORT_CALL = 20e-6
"""Seconds below which latency dominates a call."""


@frozen
class Phase:
    name: str
    seqs: int
    depth: int
    """Tokens of context before the phase."""
    tokens: int
    """Tokens of all sequences together."""
    steps: tuple[StepSize, ...]

    @property
    def length(self) -> int:
        """Tokens of context after the phase."""
        return self.depth + self.tokens // self.seqs


def prefill_phase(tokens: int, kv_bytes: float) -> Phase:
    starts = range(0, tokens, PREFILL_CHUNK)
    steps = tuple(
        StepSize(((start, min(PREFILL_CHUNK, tokens - start)),), 1, kv_bytes) for start in starts
    )
    return Phase(name=f"prefill {tokens:,}", seqs=1, depth=0, tokens=tokens, steps=steps)


def decode_phase(depth: int, seqs: int, kv_bytes: float) -> Phase:
    step = StepSize(((depth, 1),) * seqs, seqs, kv_bytes)
    name = f"decode, depth {depth:,}, batch {seqs:,}"
    return Phase(name=name, seqs=seqs, depth=depth, tokens=seqs, steps=(step,))


def phases(
    prefill: Iterable[int], depths: Sequence[int], batches: Sequence[int], kv_bytes: float
) -> list[Phase]:
    """Every prefill, every depth with the first batch, every batch at the first depth."""
    shapes: list[tuple[int, int]] = []
    if depths and batches:
        shapes += [(depth, batches[0]) for depth in depths]
        shapes += [(depths[0], batch) for batch in batches]
    decode = [decode_phase(depth, batch, kv_bytes) for depth, batch in dict.fromkeys(shapes)]
    return [prefill_phase(tokens, kv_bytes) for tokens in dict.fromkeys(prefill)] + decode


@frozen(kw_only=True)
class OpProfile:
    name: str
    calls: int
    """0 for an op that the backend added, whose cost is unknown."""
    seconds: float
    """Median; 0 if the backend does not time the op separately."""
    bytes: int
    flops: int
    kind: Kind
    """Number format of most multiply-adds."""
    memory_seconds: float
    """Seconds to move its bytes at the measured bandwidth."""
    arithmetic_seconds: float
    """Seconds of its operations at the measured rates."""
    floor: float
    """Minimum seconds: the sum of the longer of the two per call."""
    link_bytes: int = 0
    """Bytes received from other ranks."""

    @property
    def memory_share(self) -> float:
        """Share of the measured bandwidth; above 1 if bytes came from a cache."""
        return self.memory_seconds / self.seconds if self.seconds else 0.0

    @property
    def arithmetic_share(self) -> float:
        return self.arithmetic_seconds / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> Bound:
        """The limit of the op: link, memory, arithmetic or latency."""
        if not self.seconds or not self.calls:
            return "unknown"
        if self.link_bytes:
            return "link"
        if max(self.memory_share, self.arithmetic_share) < 0.5:
            return "latency" if self.seconds / self.calls < _SHORT_CALL else "neither"
        return "memory" if self.memory_share >= self.arithmetic_share else "arithmetic"


@frozen(kw_only=True)
class PhaseProfile:
    phase: Phase
    ops: tuple[OpProfile, ...]
    walls: tuple[float, ...]
    """Seconds of each round."""
    outside: float
    """Seconds outside all ops."""
    barriers: int
    """Barriers of all steps. An op's time includes its barrier."""

    @property
    def wall(self) -> float:
        return median(self.walls)

    @property
    def seconds(self) -> float:
        """Sum of the medians of the parts."""
        return sum(op.seconds for op in self.ops) + self.outside

    @property
    def floor(self) -> float:
        return sum(op.floor for op in self.ops)

    @property
    def tokens_per_second(self) -> float:
        return self.phase.tokens / self.wall

    @property
    def limit(self) -> float:
        return self.phase.tokens / self.floor


def account_phase(
    phase: Phase, program: Program, machine: Machine, rounds: Sequence[Sequence[StepTimes]]
) -> PhaseProfile:
    """Account for a phase by medians of `rounds`, the step times of each round."""
    walls = [sum(step.wall for step in steps) for steps in rounds]
    seconds = [_seconds_by_op(steps) for steps in rounds]
    outside = median(wall - sum(ops.values()) for wall, ops in zip(walls, seconds, strict=True))
    ops_by_name: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        ops_by_name[op.name].append(op)

    # A backend may time ops that the program does not have.
    names = dict.fromkeys([*ops_by_name, *(name for ops in seconds for name in ops)])
    profiles = []
    for name in names:
        op_median = median(ops.get(name, 0.0) for ops in seconds)
        profiles.append(_op_profile(name, ops_by_name[name], phase, machine, op_median))
    return PhaseProfile(
        phase=phase,
        ops=tuple(op for op in profiles if op.seconds or op.floor),
        walls=tuple(walls),
        outside=max(0.0, outside),
        barriers=sum(step.barriers for step in rounds[0]),
    )


def median_machine(machines: Sequence[Machine]) -> Machine:
    """The median of several measurements, figure by figure."""
    first = machines[0]
    return Machine(
        cpu=first.cpu,
        isa=first.isa,
        threads=first.threads,
        bandwidth=median(machine.bandwidth for machine in machines),
        rates={kind: median(machine.rates[kind] for machine in machines) for kind in first.rates},
    )


def _seconds_by_op(steps: Sequence[StepTimes]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in step.ops.items():
            total[name] += seconds
    return total


def _op_profile(
    name: str, ops: Sequence[Op], phase: Phase, machine: Machine, seconds: float
) -> OpProfile:
    calls = [(op, load) for load in phase.steps for op in ops]
    flops: dict[Kind, int] = defaultdict(int)
    for op, load in calls:
        flops[op_kind(op, load)] += op.flops(load)
    num_bytes = sum(op.bytes(load) for op, load in calls)
    return OpProfile(
        name=name,
        calls=len(calls),
        seconds=seconds,
        bytes=num_bytes,
        flops=sum(flops.values()),
        kind=max(flops, key=flops.__getitem__, default="f32"),
        memory_seconds=num_bytes / machine.bandwidth,
        arithmetic_seconds=sum(count / machine.rates[kind] for kind, count in flops.items()),
        floor=sum(op_seconds(op, load, machine) for op, load in calls),
        link_bytes=sum(op.link_bytes(load) for op, load in calls),
    )
