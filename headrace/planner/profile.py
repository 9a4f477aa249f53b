"""Where the time of steps goes, op by op, beside the least time that bytes and operations allow
(Williams et al. 2009).

A phase is what is profiled as one: a prefill in its chunks, or one decode step of a batch at a
depth. Times are measured elsewhere (`Executable.profile`); bytes, operations and limits come from
the ops themselves.
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

_SHORT = 20e-6
"""Seconds of a call that is mostly start, barrier and first cache misses."""


@frozen
class Phase:
    """Steps that are profiled as one."""

    name: str
    seqs: int
    depth: int
    """Tokens of context of each sequence before the phase."""
    tokens: int
    """Computed in the phase, all sequences together."""
    steps: tuple[StepSize, ...]

    @property
    def length(self) -> int:
        """Tokens of context of each sequence after the phase."""
        return self.depth + self.tokens // self.seqs


def prefill_phase(tokens: int, kv_bytes: float) -> Phase:
    """One prompt, from an empty cache, in chunks as the engine cuts it; a row of logits in each, as
    in `prefill_limit`.
    """
    starts = range(0, tokens, PREFILL_CHUNK)
    steps = tuple(
        StepSize(((start, min(PREFILL_CHUNK, tokens - start)),), 1, kv_bytes) for start in starts
    )
    return Phase(f"prefill {tokens:,}", 1, 0, tokens, steps)


def decode_phase(depth: int, seqs: int, kv_bytes: float) -> Phase:
    """One step of so many plainly decoding sequences, each with `depth` tokens of context."""
    step = StepSize(((depth, 1),) * seqs, seqs, kv_bytes)
    return Phase(f"decode, depth {depth:,}, batch {seqs:,}", seqs, depth, seqs, (step,))


def phases(
    prefill: Iterable[int], depths: Sequence[int], batches: Sequence[int], kv_bytes: float
) -> list[Phase]:
    """Every prefill, every depth with the first batch, and every batch at the first depth; each
    once.
    """
    shapes = [(depth, batches[0]) for depth in depths if batches] + [
        (depths[0], batch) for batch in batches if depths
    ]
    decode = [decode_phase(depth, batch, kv_bytes) for depth, batch in dict.fromkeys(shapes)]
    return [prefill_phase(tokens, kv_bytes) for tokens in dict.fromkeys(prefill)] + decode


@frozen
class OpProfile:
    """All calls of one kind of op in a phase."""

    name: str
    calls: int
    """0 where the program has no such op: the backend has brought it along, and its cost is
    unknown.
    """
    seconds: float
    """0 where the backend does not time it by itself."""
    bytes: int
    flops: int
    kind: Kind
    """Number format of most of its multiply-adds."""
    memory_seconds: float
    """What its bytes take at the measured bandwidth."""
    arithmetic_seconds: float
    """What its operations take at the measured rates."""
    floor: float
    """Least seconds: call by call, the longer of the two."""
    link_bytes: int = 0
    """Received from other ranks."""

    @property
    def memory_share(self) -> float:
        """Share of the measured bandwidth; above 1 the bytes came from a cache, or the machine was
        busier when it was measured.
        """
        return self.memory_seconds / self.seconds if self.seconds else 0.0

    @property
    def arithmetic_share(self) -> float:
        """Share of the measured rate."""
        return self.arithmetic_seconds / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> Bound:
        """The link to other ranks if it is used; memory or arithmetic if it explains half of the
        time or more; else latency of short calls, and neither of long ones.
        """
        if not self.seconds or not self.calls:
            return "unknown"
        if self.link_bytes:
            return "link"
        if max(self.memory_share, self.arithmetic_share) < 0.5:
            return "latency" if self.seconds / self.calls < _SHORT else "neither"
        return "memory" if self.memory_share >= self.arithmetic_share else "arithmetic"


@frozen
class PhaseProfile:
    """A phase as it was measured."""

    phase: Phase
    ops: tuple[OpProfile, ...]
    """In the order in which the program first names them."""
    walls: tuple[float, ...]
    """Seconds of each round from the first call to the last return."""
    outside: float
    """Seconds of no op: the calls themselves, checking the batch, waking the threads."""
    barriers: int
    """All steps together. The wait at the end of an op is part of its time."""

    @property
    def wall(self) -> float:
        """Median seconds of a round."""
        return median(self.walls)

    @property
    def seconds(self) -> float:
        """Sum of the parts, each of them a median: close to `wall`, and what shares are taken
        of.
        """
        return sum(op.seconds for op in self.ops) + self.outside

    @property
    def floor(self) -> float:
        """Least seconds of all ops."""
        return sum(op.floor for op in self.ops)

    @property
    def tokens_per_second(self) -> float:
        return self.phase.tokens / self.wall

    @property
    def limit(self) -> float:
        """Most tokens per second."""
        return self.phase.tokens / self.floor


def account(
    phase: Phase, program: Program, machine: Machine, rounds: Sequence[Sequence[StepTimes]]
) -> PhaseProfile:
    """What the rounds of a phase, each with the times of all its steps, come to: medians over the
    rounds.
    """
    walls = [sum(step.wall for step in steps) for steps in rounds]
    seconds = [_total(steps) for steps in rounds]
    outside = median(wall - sum(ops.values()) for wall, ops in zip(walls, seconds, strict=True))
    groups: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        groups[op.name].append(op)
    names = dict.fromkeys([*groups, *(name for ops in seconds for name in ops)])
    ops = (
        _op_profile(
            name, groups[name], phase, machine, median(ops.get(name, 0.0) for ops in seconds)
        )
        for name in names
    )
    barriers = sum(step.barriers for step in rounds[0])
    return PhaseProfile(
        phase,
        tuple(op for op in ops if op.seconds or op.floor),
        tuple(walls),
        max(0.0, outside),
        barriers,
    )


def typical(machines: Sequence[Machine]) -> Machine:
    """The median of several measurements of a machine, figure by figure: what the medians of a
    profile are to be held against.
    """
    first = machines[0]
    rates = {kind: median(machine.rates[kind] for machine in machines) for kind in first.rates}
    return Machine(
        first.cpu,
        first.isa,
        first.threads,
        median(machine.bandwidth for machine in machines),
        rates,
    )


def _total(steps: Sequence[StepTimes]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in step.ops.items():
            total[name] += seconds
    return total


def _op_profile(
    name: str, ops: Sequence[Op], phase: Phase, machine: Machine, seconds: float
) -> OpProfile:
    calls = [(op, size) for size in phase.steps for op in ops]
    flops: dict[Kind, int] = defaultdict(int)
    for op, size in calls:
        flops[op_kind(op, size)] += op.flops(size)
    num_bytes = sum(op.bytes(size) for op, size in calls)
    return OpProfile(
        name=name,
        calls=len(calls),
        seconds=seconds,
        bytes=num_bytes,
        flops=sum(flops.values()),
        kind=max(flops, key=flops.__getitem__, default="f32"),
        memory_seconds=num_bytes / machine.bandwidth,
        arithmetic_seconds=sum(count / machine.rates[kind] for kind, count in flops.items()),
        floor=sum(op_seconds(op, size, machine) for op, size in calls),
        link_bytes=sum(op.link_bytes(size) for op, size in calls),
    )
