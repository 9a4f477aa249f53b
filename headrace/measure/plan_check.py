"""Compares predicted with measured times on this machine: steps of the executable, and requests.

The points are in `plan_points.toml`. They run in turns, and the quietest turn counts. The bandwidth
of a shared machine changes by the minute: it is measured before and after each turn of a step, and
the prediction uses the mean.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, Unpack

from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import LOSSY_FILES, LOSSY_OPTIONS, EngineConfig
from headrace.errors import RequestError
from headrace.loader.activation_sparsity import check_activation_sparsity
from headrace.loader.early_exit import check_early_exit, with_exit_map
from headrace.loader.options import engine_config
from headrace.measure.bench import Run
from headrace.measure.op_profile import median_machine
from headrace.measure.options import ModeOptions
from headrace.measure.phase_timer import PhaseTimer, Roof, step_blocks, step_phase
from headrace.measure.place import cpu_reaches
from headrace.measure.placed_model import main_format, open_model, stage_programs
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.measure.random_bench import RandomBench, tiny_tokenizer
from headrace.measure.random_model import random_checkpoint
from headrace.parallel.mesh import Mesh
from headrace.planner import hardware
from headrace.planner.hardware import Machine
from headrace.planner.reach import Reaches
from headrace.planner.step_time import StepTimer
from headrace.planner.steps import decode_step, start_steps
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.record import frozen

PointKind = Literal["step", "first token", "time per token"]

_TURNS = 4
_SECONDS = 0.1
"""Minimum seconds of a step's measurements in a turn."""
_RUNS = 4
"""Runs of each kind of requests."""


class Point(NamedTuple):
    """A predicted and a measured time, in seconds."""

    model: str
    format: str
    kind: PointKind
    name: str
    predicted: float
    measured: float
    bandwidth: float
    """Bytes/s around the measurement."""

    @property
    def error(self) -> float:
        """Share by which the prediction is too long."""
        return self.predicted / self.measured - 1


@frozen(kw_only=True)
class PlanCheck:
    machine: Machine
    """Medians of all measured roofs."""
    reach: str
    """Source of the kernels' speeds."""
    points: tuple[Point, ...]

    def errors(self, kind: PointKind) -> list[float]:
        """Absolute errors of a kind of points."""
        return [abs(point.error) for point in self.points if point.kind == kind]

    def facts(self) -> dict[str, Any]:
        """The check as JSON, in seconds and shares of 1."""
        kinds = dict.fromkeys(point.kind for point in self.points)
        return {
            "cpu": self.machine.cpu,
            "isa": self.machine.isa,
            "threads": self.machine.threads,
            "bandwidth": self.machine.bandwidth,
            "rates": dict(self.machine.rates),
            "reach": self.reach,
            "errors": {
                kind: {"median": median(self.errors(kind)), "max": max(self.errors(kind))}
                for kind in kinds
            },
            "points": [point._asdict() | {"error": point.error} for point in self.points],
        }


@frozen(kw_only=True)
class _Case:
    """A model, its steps by sequence, and its requests (batch, prompt, output)."""

    checkpoint: Checkpoint
    format: str
    steps: Sequence[tuple[tuple[int, int], ...]]
    requests: Sequence[tuple[int, int, int]]
    tokenizer: Tokenizer
    config: EngineConfig


def check_plan(
    model: str | None = None,
    *,
    kv_dtype: KvDtype = "bf16",
    requests: bool = True,
    on_progress: ProgressCallback = ignore_progress,
    **modes: Unpack[ModeOptions],
) -> PlanCheck:
    """Measure the points, and predict them with the calibration of this machine.

    Without a model, random models of the shapes and formats in `plan_points.toml` run, which takes
    some minutes. A model runs the first steps there that fit into its context.

    `modes`: lossy options, as in `EngineConfig`. Raises RequestError for a calibration file without
    its model.
    """
    reaches = cpu_reaches()
    machines: list[Machine] = []
    points: list[Point] = []
    config = engine_config({**modes, "backend": "cpu", "kv_dtype": kv_dtype})
    if model is None:
        for option in LOSSY_FILES:
            if getattr(config, option):
                raise RequestError(f"{option} is a file for one model; name the model to check")
    cases = list(_cases(config)) if model is None else [_case_of(model, config)]
    for number, case in enumerate(cases):
        on_progress("plan and measurement", number / len(cases))
        measured = _measure_steps(case, reaches)
        machines.append(measured.machine)
        points += measured.points
        if requests and case.requests:
            measured = _measure_requests(case, reaches)
            machines.append(measured.machine)
            points += measured.points
    return PlanCheck(machine=median_machine(machines), reach=reaches.source, points=tuple(points))


def _read_points() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "plan_points.toml").read_text())


def _cases(config: EngineConfig) -> Iterator[_Case]:
    record = _read_points()
    tokenizer = tiny_tokenizer()
    for case in record["cases"]:
        shape, format = case["shape"], case["format"]
        yield _Case(
            checkpoint=random_checkpoint(shape, record["shapes"][shape], format),
            format=format,
            steps=_steps(case),
            requests=[tuple(request) for request in case["requests"]],
            tokenizer=tokenizer,
            config=config,
        )


def _case_of(model: str, config: EngineConfig) -> _Case:
    checkpoint, case = open_model(model), _read_points()["cases"][0]
    check_early_exit(config, checkpoint)
    check_activation_sparsity(config, checkpoint)
    checkpoint = with_exit_map(checkpoint, config)
    context = checkpoint.spec.max_context
    fitting = [
        step for step in _steps(case) if all(depth + rows <= context for depth, rows in step)
    ]
    return _Case(
        checkpoint=checkpoint,
        format=main_format(checkpoint).name,
        steps=fitting,
        requests=[tuple(r) for r in case["requests"] if r[1] + r[2] <= context],
        tokenizer=checkpoint.load_tokenizer(),
        config=config,
    )


def _steps(case: Mapping[str, Any]) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple((depth, rows) for seqs, depth, rows in groups for _ in range(seqs))
        for groups in case["steps"]
    ]


class _Turn(NamedTuple):
    """Measured seconds, and the bandwidth around the measurement."""

    seconds: float
    bandwidth: float


class _Measured(NamedTuple):
    points: list[Point]
    machine: Machine


def _measure_steps(case: _Case, reaches: Reaches) -> _Measured:
    checkpoint, name = case.checkpoint, case.checkpoint.spec.name
    config = case.config
    programs = stage_programs(checkpoint, "cpu", Mesh(), config)
    kv_bytes = number_bytes(programs[0].kv_groups, config.kv_format)
    steps = [StepSize(seqs, len(seqs), kv_bytes) for seqs in case.steps]
    blocks = max(step_blocks(step, config.traits.kv_block_size) for step in steps)
    timer = PhaseTimer(name, checkpoint, config, blocks)
    turns: list[list[_Turn]] = [[] for _ in steps]
    try:
        machines = [hardware.measure()]
        roof = Roof()
        for _ in range(_TURNS):
            for index, step in enumerate(steps):
                rounds = timer.time_phase(step_phase(step), _SECONDS)
                wall = median(times.wall for (times,) in rounds)
                turns[index].append(_Turn(wall, roof.around()))
        machines.append(hardware.measure())
    finally:
        timer.close()

    machine = median_machine(machines)
    points = []
    for step, found in zip(steps, turns, strict=True):
        turn = min(found)
        timer_then = _timer(programs, machine, turn, reaches)
        predicted = timer_then.launch_seconds(step)
        points.append(_point(case, "step", _step_name(step), predicted, turn))
    return _Measured(points, machine)


def _point(case: _Case, kind: PointKind, name: str, predicted: float, turn: _Turn) -> Point:
    return Point(
        model=case.checkpoint.spec.name,
        format=case.format,
        kind=kind,
        name=name,
        predicted=predicted,
        measured=turn.seconds,
        bandwidth=turn.bandwidth,
    )


def _timer(programs: list[Program], machine: Machine, turn: _Turn, reaches: Reaches) -> StepTimer:
    """A timer with the bandwidth of a turn."""
    return StepTimer(programs, replace(machine, bandwidth=turn.bandwidth), reaches)


def _step_name(step: StepSize) -> str:
    """Name of a step: its sequences, their depth and rows."""
    groups = dict.fromkeys(step.seqs)
    return " + ".join(f"{step.seqs.count(group)} x {group[1]} at {group[0]:,}" for group in groups)


def _measure_requests(case: _Case, reaches: Reaches) -> _Measured:
    programs = stage_programs(case.checkpoint, "cpu", Mesh(), case.config)
    machines = [hardware.measure()]
    starts: list[list[_Turn]] = [[] for _ in case.requests]
    betweens: list[list[_Turn]] = [[] for _ in case.requests]
    modes = {name: getattr(case.config, name) for name in (*LOSSY_OPTIONS, "kv_dtype")}
    with RandomBench(case.checkpoint, case.tokenizer, case.requests, modes=modes) as bench:
        max_rows, kv_bytes = bench.max_rows, number_bytes(programs[0].kv_groups, bench.kv_format)
        for request in case.requests:
            bench.run(*request)  # warms up
        roof = Roof()
        for _ in range(_RUNS):
            for index, request in enumerate(case.requests):
                run, bandwidth = bench.run(*request), roof.around()
                start = max(times[0] for times in run.tokens)
                starts[index].append(_Turn(start, bandwidth))
                betweens[index].append(_Turn(_per_token(run), bandwidth))
        machines.append(hardware.measure())

    machine, points = median_machine(machines), []
    for number, (seqs, prompt, output) in enumerate(case.requests):
        label = f"{seqs} x {prompt:,} + {output}"
        turn = min(starts[number])
        timer = _timer(programs, machine, turn, reaches)
        start = sum(map(timer.seconds, start_steps(prompt, seqs, max_rows, kv_bytes)))
        start += seqs * timer.request_seconds
        points.append(_point(case, "first token", label, start, turn))
        turn = min(betweens[number])
        timer = _timer(programs, machine, turn, reaches)
        between = timer.seconds(decode_step(prompt + output // 2, seqs, kv_bytes))
        points.append(_point(case, "time per token", label, between, turn))
    return _Measured(points, machine)


def _per_token(run: Run) -> float:
    """Seconds between tokens while all requests decode."""
    last = max(run.tokens, key=lambda times: times[0])
    end = min(times[-1] for times in run.tokens)
    within = [time for time in last if time <= end]
    return (within[-1] - within[0]) / (len(within) - 1)
