"""Time of each op in the phases of a profile, next to the roofline limit (Williams et al. 2009).

A phase is a prefill in its chunks, or one decode step of a batch at a depth of context.
`Executable.profile` takes the times; bytes, operations and limits come from the ops themselves.
"""

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
"""Seconds below which a call is mostly start, barrier and first cache misses."""


@frozen
class Phase:
    """Steps that are profiled together."""

    name: str
    seqs: int
    depth: int
    """Tokens of context of each sequence before the phase."""
    tokens: int
    """Tokens computed in the phase, by all sequences together."""
    steps: tuple[StepSize, ...]

    @property
    def length(self) -> int:
        """Tokens of context of each sequence after the phase."""
        return self.depth + self.tokens // self.seqs


def prefill_phase(tokens: int, kv_bytes: float) -> Phase:
    """One prompt from an empty cache, in chunks as the engine cuts it, with a logit row in each."""
    starts = range(0, tokens, PREFILL_CHUNK)
    steps = tuple(
        StepSize(((start, min(PREFILL_CHUNK, tokens - start)),), 1, kv_bytes) for start in starts
    )
    return Phase(name=f"prefill {tokens:,}", seqs=1, depth=0, tokens=tokens, steps=steps)


def decode_phase(depth: int, seqs: int, kv_bytes: float) -> Phase:
    """One plain decode step of `seqs` sequences, each with `depth` tokens of context."""
    step = StepSize(((depth, 1),) * seqs, seqs, kv_bytes)
    name = f"decode, depth {depth:,}, batch {seqs:,}"
    return Phase(name=name, seqs=seqs, depth=depth, tokens=seqs, steps=(step,))


def phases(
    prefill: Iterable[int], depths: Sequence[int], batches: Sequence[int], kv_bytes: float
) -> list[Phase]:
    """Every prefill, every depth with the first batch, and every batch at the first depth."""
    shapes: list[tuple[int, int]] = []
    if depths and batches:
        shapes += [(depth, batches[0]) for depth in depths]
        shapes += [(depths[0], batch) for batch in batches]
    decode = [decode_phase(depth, batch, kv_bytes) for depth, batch in dict.fromkeys(shapes)]
    return [prefill_phase(tokens, kv_bytes) for tokens in dict.fromkeys(prefill)] + decode


@frozen(kw_only=True)
class OpProfile:
    """All calls of one kind of op in a phase."""

    name: str
    calls: int
    """Number of calls; 0 for an op that the backend added, whose cost is unknown."""
    seconds: float
    """Median seconds; 0 if the backend does not time the op separately."""
    bytes: int
    flops: int
    kind: Kind
    """Number format of most of its multiply-adds."""
    memory_seconds: float
    """Seconds to move its bytes at the measured bandwidth."""
    arithmetic_seconds: float
    """Seconds of its operations at the measured rates."""
    floor: float
    """Minimum seconds: the sum over its calls of the longer of the two."""
    link_bytes: int = 0
    """Bytes received from other ranks."""

    @property
    def memory_share(self) -> float:
        """Share of the measured bandwidth.

        It exceeds 1 if the bytes came from a cache, or if the machine was busier when it was
        measured.
        """
        return self.memory_seconds / self.seconds if self.seconds else 0.0

    @property
    def arithmetic_share(self) -> float:
        """Share of the measured rate of operations."""
        return self.arithmetic_seconds / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> Bound:
        """The resource that limits the op.

        This is the link to other ranks if the op uses it, or else memory or arithmetic if it
        explains half of the time. Otherwise short calls are bound by latency.
        """
        if not self.seconds or not self.calls:
            return "unknown"
        if self.link_bytes:
            return "link"
        if max(self.memory_share, self.arithmetic_share) < 0.5:
            return "latency" if self.seconds / self.calls < _SHORT_CALL else "neither"
        return "memory" if self.memory_share >= self.arithmetic_share else "arithmetic"


@frozen(kw_only=True)
class PhaseProfile:
    """A phase as it was measured."""

    phase: Phase
    ops: tuple[OpProfile, ...]
    """In the order of the program."""
    walls: tuple[float, ...]
    """Seconds of each round, from its first call to its last return."""
    outside: float
    """Seconds outside all ops: the calls themselves, checking the batch, waking the threads."""
    barriers: int
    """Barriers of all steps. The time of an op includes the wait at its end."""

    @property
    def wall(self) -> float:
        """Median seconds of a round."""
        return median(self.walls)

    @property
    def seconds(self) -> float:
        """Sum of the medians of the parts, close to `wall`; shares refer to it."""
        return sum(op.seconds for op in self.ops) + self.outside

    @property
    def floor(self) -> float:
        """Minimum seconds of all ops."""
        return sum(op.floor for op in self.ops)

    @property
    def tokens_per_second(self) -> float:
        return self.phase.tokens / self.wall

    @property
    def limit(self) -> float:
        """Maximum tokens/s."""
        return self.phase.tokens / self.floor


def account_phase(
    phase: Phase, program: Program, machine: Machine, rounds: Sequence[Sequence[StepTimes]]
) -> PhaseProfile:
    """Account for the time of a phase; `rounds` has the step times of each round.

    All times are medians over the rounds.
    """
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
    """The median of several measurements of a machine, figure by figure.

    The times of a profile are medians, too, so they compare with it.
    """
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
