"""The advised configuration next to the best of a brute-force run of the same grid.

    python benchmarks/advice.py measure --out grid.jsonl
    python benchmarks/advice.py report grid.jsonl

`measure` runs every configuration of the grid of the default model on this machine: its own file,
and Q8_0 and BF16 files that it makes; KV in bf16 and int8; all users of the workload in a batch, or
half of them; two prompt chunks. As many tasks as users send requests one after the other, with
log-normal lengths (sigma 0.5, at most twice the mean). The first requests are not counted.
`report` asks `headrace plan --goal` for five goals, and compares the measured metric of the advised
configuration with the best measured one that meets the bounds. Repeated measurements are averaged.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from headrace import AsyncLLM, SamplingParams
from headrace.backend_traits import KvDtype
from headrace.measure.advice import find_advice
from headrace.measure.configurations import Candidate, Search, SearchSpace
from headrace.measure.goal import Goal, parse_goal
from headrace.measure.table import print_table

MODEL = "smollm2"
FORMATS = ("Q4_1", "Q8_0", "BF16")
KV_FORMATS: tuple[KvDtype, ...] = ("bf16", "int8")
CHUNKS = (16, 256)
WORKLOADS = {"many": "users=16 prompt=128 output=64", "long": "users=4 prompt=1k output=64"}
GOALS = (
    ("many", "throughput"),
    ("many", "throughput tpot<7ms"),
    ("many", "ttft"),
    ("long", "throughput"),
    ("long", "tpot ttft<600ms"),
)
"""Workload, and metric with bounds, which lie between groups of predicted values."""
_SECONDS = {"many": 2.5, "long": 4.0}
_SIGMA = 0.5
_FIELDS = ("format", "kv_dtype", "max_num_seqs", "chunk")


class Point(NamedTuple):
    """A configuration, and its measured means."""

    format: str
    kv_dtype: str
    max_num_seqs: int
    chunk: int
    ttft: float
    tpot: float
    throughput: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:4]


class Answer(NamedTuple):
    """Times of a request, and its output tokens."""

    sent: float
    first: float
    """Of its first token."""
    last: float
    output: int


def goal_of(workload: str, terms: str = "throughput") -> Goal:
    return parse_goal(f"{terms} {WORKLOADS[workload]}")


def batches(goal: Goal) -> tuple[int, ...]:
    return goal.users, goal.users // 2


def space_of(goal: Goal) -> SearchSpace:
    """The grid of a workload, on this machine."""
    return SearchSpace(
        on=("this",), formats=FORMATS, kv_dtypes=KV_FORMATS, batches=batches(goal), chunks=CHUNKS
    )


def measure(args: argparse.Namespace) -> None:
    for workload in WORKLOADS:
        goal = goal_of(workload)
        for format, kv_dtype, max_num_seqs, chunk in product(
            FORMATS, KV_FORMATS, batches(goal), CHUNKS
        ):
            options = {
                "kv_dtype": kv_dtype,
                "max_num_seqs": max_num_seqs,
                "chunked_prefill_size": chunk,
                "max_model_len": 2 * goal.context,
            }
            with AsyncLLM(model_file(format, args.models), backend="cpu", **options) as llm:
                figures = asyncio.run(serve(llm, goal, _SECONDS[workload]))
            entry = {"workload": workload, "format": format, "chunk": chunk, **options, **figures}
            with args.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), file=sys.stderr, flush=True)


def model_file(format: str, folder: Path) -> str:
    """The default model in a format, which `headrace convert` makes once."""
    if format == FORMATS[0]:
        return MODEL
    file = folder / f"{MODEL}-{format}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "headrace", "convert", MODEL, str(file), "--to", format]
        subprocess.run(command, check=True)
    return str(file)


async def serve(llm: AsyncLLM, goal: Goal, seconds: float) -> dict[str, float]:
    """Let users send requests for some seconds after the first ones, and average over them."""
    rng = np.random.default_rng(7)
    answers: list[Answer] = []
    num_warm = 0
    stop = float("inf")

    def length(mean_length: int) -> int:
        drawn = rng.lognormal(np.log(mean_length) - _SIGMA**2 / 2, _SIGMA)
        return max(2, min(2 * mean_length, int(drawn)))

    async def ask() -> Answer:
        prompt = rng.integers(1000, 40000, size=length(goal.prompt)).tolist()
        output = length(goal.output)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        sent = time.perf_counter()
        result = await llm.generate({"prompt_token_ids": prompt}, params)
        timing = result.timing
        first = sent + timing.queue + timing.prefill
        return Answer(sent, first, first + timing.decode, output)

    async def user() -> None:
        nonlocal num_warm, stop
        answers.append(await ask())
        num_warm += 1
        if num_warm == goal.users:
            stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            answers.append(await ask())

    await asyncio.gather(*(user() for _ in range(goal.users)))
    start = stop - seconds
    counted = [answer for answer in answers if answer.sent >= start]
    decoded = sum(answer.output - 1 for answer in counted)
    return {
        "ttft": mean(answer.first - answer.sent for answer in counted),
        "tpot": sum(answer.last - answer.first for answer in counted) / decoded,
        "throughput": sum(tokens_within(answer, start, stop) for answer in answers) / seconds,
        "requests": len(counted),
    }


def tokens_within(answer: Answer, start: float, stop: float) -> float:
    """Tokens between two times; those after the first come at an even rate."""
    rate = (answer.output - 1) / max(1e-9, answer.last - answer.first)
    overlap = min(stop, answer.last) - max(start, answer.first)
    return rate * max(0.0, overlap) + (start <= answer.first < stop)


def report(args: argparse.Namespace) -> None:
    points = {workload: list(read(args.files, workload)) for workload in WORKLOADS}
    rows = []
    for workload, terms in GOALS:
        if not points[workload]:
            continue
        goal = goal_of(workload, terms)
        advice = find_advice(MODEL, goal, space_of(goal))
        found = advice.best or advice.nearest
        assert found and goal.best
        measured = {point.key: point for point in points[workload]}
        advised = measured[key_of(found)]
        best = best_point(points[workload], goal)
        value, limit = getattr(advised, goal.best), getattr(best, goal.best)
        ratio = value / limit if goal.best == "throughput" else limit / value
        rows.append(
            [
                f"{terms} {WORKLOADS[workload]}",
                name_of(advised),
                figure(goal.best, value),
                name_of(best),
                figure(goal.best, limit),
                f"{ratio:.3f}",
                figure(goal.best, found.value(goal.best)),
                "yes" if meets(advised, goal) else "no",
            ]
        )
    headings = ["goal", "advised", ">measured", "best of the grid", ">measured", ">ratio"]
    print_table([*headings, ">predicted", "bounds met"], rows)
    for workload, terms in WORKLOADS.items():
        if not points[workload]:
            continue
        errors = prediction_errors(points[workload], goal_of(workload))
        texts = (f"{metric} {np.median(e):.1%} ({max(e):.0%})" for metric, e in errors.items())
        print(
            f"{terms}, {len(points[workload])} configurations: error, median (max): "
            + ", ".join(texts)
        )


def read(files: list[Path], workload: str) -> Iterator[Point]:
    """The mean of repeated measurements of each configuration."""
    entries: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        entry = json.loads(line)
        if entry["workload"] == workload:
            entries.setdefault(tuple(entry[name] for name in _FIELDS), []).append(entry)
    for key, group in entries.items():
        figures = (mean(e[name] for e in group) for name in ("ttft", "tpot", "throughput"))
        yield Point(*key, *figures)


def key_of(found: Candidate) -> tuple[Any, ...]:
    setup, engine = found.setup, found.engine
    return setup.format, setup.kv_dtype, engine.max_num_seqs, engine.chunk


def meets(point: Point, goal: Goal) -> bool:
    bounds = [(point.ttft, goal.ttft), (point.tpot, goal.tpot)]
    return all(bound is None or value <= bound for value, bound in bounds)


def best_point(points: list[Point], goal: Goal) -> Point:
    met = [point for point in points if meets(point, goal)]
    if goal.best == "throughput":
        return max(met, key=lambda point: point.throughput)
    return min(met, key=lambda point: getattr(point, str(goal.best)))


def prediction_errors(points: list[Point], goal: Goal) -> dict[str, list[float]]:
    """Relative errors of all configurations of a workload."""
    search = Search(MODEL, space_of(goal))
    predicted = {
        key_of(one): one for setup in search.setups() for one in search.candidates(goal, setup, 1)
    }
    errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "throughput": []}
    for point in points:
        for metric, found in errors.items():
            value = predicted[point.key].value(metric)  # type: ignore[arg-type]
            found.append(abs(value / getattr(point, metric) - 1))
    return errors


def name_of(point: Point) -> str:
    return f"{point.format}, KV {point.kv_dtype}, {point.max_num_seqs} seqs, chunk {point.chunk}"


def figure(metric: str, value: float) -> str:
    return f"{value:,.0f} tokens/s" if metric == "throughput" else f"{1e3 * value:,.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    measured = commands.add_parser("measure")
    measured.set_defaults(run=measure)
    measured.add_argument("--out", type=Path, required=True, help="file of JSON lines, appended to")
    measured.add_argument("--models", type=Path, default=Path(".bench/models"))
    reported = commands.add_parser("report")
    reported.set_defaults(run=report)
    reported.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
