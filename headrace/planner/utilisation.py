"""Use of a machine by steps: MBU and MFU.

MBU is the share of the bandwidth that necessary bytes take: weights once a step, and the KV that
its rows see. MFU is the share of the time that the operations would take at the machine's rates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import floor
from typing import Any, NamedTuple

from headrace.backend_traits import KvDtype, traits_of
from headrace.planner import hardware
from headrace.planner.calibration import stored_calibration
from headrace.planner.hardware import Machine
from headrace.planner.machine_files import machine_file_of
from headrace.planner.roofline import op_kind
from headrace.planner.step_time import StepTimer, equal_ops, known_reaches
from headrace.program.kv import number_bytes
from headrace.program.op import Kind, StepSize
from headrace.program.trace import Program
from headrace.record import frozen
from headrace.stats import NO_STEPS, StepTotals, ratio


@frozen
class Work:
    """Bytes and operations that steps need."""

    bytes: float
    flops: Mapping[Kind, float]
    """By number format."""

    def plus(self, more: "Work", factor: float = 1.0) -> "Work":
        kinds = self.flops.keys() | more.flops.keys()
        flops = {k: self.flops.get(k, 0.0) + factor * more.flops.get(k, 0.0) for k in kinds}
        return Work(self.bytes + factor * more.bytes, flops)

    def mbu(self, seconds: float, machine: Machine) -> float:
        """Share of the bandwidth; above 1 if bytes came from a cache."""
        return ratio(self.bytes, seconds * machine.bandwidth)

    def mfu(self, seconds: float, machine: Machine) -> float:
        """Share of the rates."""
        return ratio(sum(n / machine.rates[kind] for kind, n in self.flops.items()), seconds)


NO_WORK = Work(0.0, {})
MEASURED, DATASHEET = "measured", "datasheet"
"""Names of roofs."""


class WorkCounter:
    """Counts the work of steps of a program."""

    def __init__(self, program: Program) -> None:
        self._ops = equal_ops(program)

    def of(self, step: StepSize) -> Work:
        num_bytes, flops = 0.0, dict[Kind, float]()
        for op, calls in self._ops:
            num_bytes += calls * op.bytes(step)
            if count := op.flops(step):
                kind = op_kind(op, step)
                flops[kind] = flops.get(kind, 0.0) + calls * count
        return Work(num_bytes, flops)


@frozen(kw_only=True)
class StepUse:
    """Steps of one kind: their mean time, its prediction, and their use of the machine."""

    steps: int
    seconds: float
    """Of a step."""
    predicted: float | None
    """Seconds of a step; None for a backend whose kernels were not measured."""
    bytes: float
    """Of a step."""
    flops: float
    mbu: Mapping[str, float]
    """By the name of the roof."""
    mfu: Mapping[str, float]
    tokens: float = 0.0
    """Of a step: prompt tokens if it has any, else output tokens."""

    @property
    def error(self) -> float | None:
        """Predicted time over the measured, less 1."""
        return self.predicted / self.seconds - 1 if self.predicted else None

    def facts(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error}


class UseMeter:
    """Reads the use of a machine from totals of steps.

    Args:
        program: the model, lowered for the backend.
        kv_bytes: bytes of a key or value number.
        roofs: the same machine as measured and as its datasheet says, by `MEASURED` and
            `DATASHEET`.
        timer: the planner's, for predictions; see `planned`.
    """

    def __init__(
        self,
        program: Program,
        kv_bytes: float,
        roofs: Mapping[str, Machine],
        timer: StepTimer | None,
    ) -> None:
        self.roofs = roofs
        self._kv_bytes = kv_bytes
        self._counter = WorkCounter(program)
        self._timer = timer

    def of(self, totals: StepTotals) -> StepUse | None:
        """None if no step has run."""
        if not totals.steps or not totals.seconds:
            return None
        steps = list(mean_steps(totals, self._kv_bytes))
        tokens = (totals.prompt_rows or totals.tokens) / totals.steps
        seconds = self._timer.seconds if self._timer else None
        return replace(self._use(steps, totals.steps, totals.seconds, seconds), tokens=tokens)

    def of_launches(self, steps: Sequence[StepSize], seconds: float) -> StepUse:
        """Use of steps of an executable without an engine, which take `seconds` together."""
        weighted = [WeightedStep(1 / len(steps), step) for step in steps]
        predict = self._timer.launch_seconds if self._timer else None
        return self._use(weighted, len(steps), seconds, predict)

    def _use(
        self,
        steps: Sequence["WeightedStep"],
        count: int,
        seconds: float,
        predict: Callable[[StepSize], float] | None,
    ) -> StepUse:
        work, predicted = NO_WORK, 0.0
        for weight, step in steps:
            work = work.plus(self._counter.of(step), weight)
            if predict:
                predicted += weight * predict(step)
        mean = seconds / count
        return StepUse(
            steps=count,
            seconds=mean,
            predicted=predicted or None,
            bytes=work.bytes,
            flops=sum(work.flops.values()),
            mbu={name: work.mbu(mean, roof) for name, roof in self.roofs.items()},
            mfu={name: work.mfu(mean, roof) for name, roof in self.roofs.items()},
        )


def meter_of(program: Program, backend: str, threads: int, kv_dtype: KvDtype) -> UseMeter | None:
    """The meter of a program on this machine. None if no command has measured the machine."""
    machine = hardware.cached_machine(threads, backend)
    if machine is None:
        return None
    kv_bytes = number_bytes(program.kv_groups, kv_dtype)
    timer = planned(program, backend, threads, machine)
    return UseMeter(program, kv_bytes, roofs_of(machine), timer)


def planned(program: Program, backend: str, threads: int, machine: Machine) -> StepTimer | None:
    """The timer of a plan of this machine, which counts on the highest rates of the last day.

    `machine` replaces them if nothing is stored. None if no kernels of the backend were measured.
    """
    reaches = known_reaches(backend)
    if reaches is None:
        return None
    if not traits_of(backend).on_gpu and (stored := stored_calibration(threads)):
        reaches = stored.reaches
    return StepTimer([program], hardware.cached_machine(threads, backend) or machine, reaches)


def roofs_of(machine: Machine) -> dict[str, Machine]:
    """The measured roofs of a machine, and those of its datasheet if a machine file names it."""
    found = machine_file_of(machine)
    return {MEASURED: machine} | ({DATASHEET: found.machine()} if found else {})


class RecentSteps:
    """Totals of the last seconds, from totals since the start."""

    def __init__(self, seconds: float = 4.0) -> None:
        self._seconds = seconds
        self._history: list[tuple[float, Mapping[str, StepTotals]]] = []

    def update(self, now: float, totals: Mapping[str, StepTotals]) -> dict[str, StepTotals]:
        """Totals by kind since the reading that is `seconds` old, or since the first one."""
        history = self._history
        if history and any(totals[kind].steps < old.steps for kind, old in history[-1][1].items()):
            history.clear()  # the engine was restarted
        while len(history) > 1 and history[1][0] <= now - self._seconds:
            del history[0]
        before = history[0][1] if history else dict.fromkeys(totals, NO_STEPS)
        history.append((now, totals))
        return {kind: total.minus(before[kind]) for kind, total in totals.items()}


class WeightedStep(NamedTuple):
    weight: float
    """Share of the steps."""
    step: StepSize


def mean_steps(totals: StepTotals, kv_bytes: float) -> Iterator[WeightedStep]:
    """Steps of the mean size. A mean of 2.3 sequences gives steps with two and with three.

    Costs that are linear in sequences, rows and context are exact. `kv_bytes` is the size of a
    key or value number.
    """
    for seqs_weight, seqs in _around(totals.seqs, totals.steps):
        for prompts_weight, prompts in _around(totals.prompts, totals.steps):
            decoding = _sequences(seqs, totals.seqs, totals.context, totals.rows)
            reading = _sequences(prompts, totals.prompts, totals.prompt_context, totals.prompt_rows)
            share = ratio(seqs + prompts, totals.seqs + totals.prompts)
            logit_rows = round(totals.logit_rows * share)
            step = StepSize((*decoding, *reading), logit_rows, kv_bytes)
            if step.seqs:
                yield WeightedStep(seqs_weight * prompts_weight, step)


def _around(total: int, steps: int) -> Iterator[tuple[float, int]]:
    """Weights of the whole numbers around a mean."""
    below = floor(total / steps) if steps else 0
    above = ratio(total, steps) - below
    for weight, number in ((1 - above, below), (above, below + 1)):
        if weight:
            yield weight, number


def _sequences(number: int, of: int, context: int, rows: int) -> Iterator[tuple[int, int]]:
    """The mean sizes of `of` sequences, as (context, rows) of `number` of them."""
    if number:
        contexts = _shares(round(context * number / of), number)
        yield from zip(contexts, _shares(round(rows * number / of), number), strict=True)


def _shares(total: int, number: int) -> list[int]:
    low, more = divmod(total, number)
    return [low + (index < more) for index in range(number)]
