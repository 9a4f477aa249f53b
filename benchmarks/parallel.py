"""Several ranks on this machine: speed, idle time of a pipeline, and recovery from a lost rank.

    python benchmarks/parallel.py ranks              speed of splits, in turns with one rank
    python benchmarks/parallel.py bubble --svg FILE  m steps through two stages of one thread each
    python benchmarks/parallel.py lost               seconds from a lost rank to the next token

Ranks are processes on this machine with one thread each. Figures are medians (min-max) over
--rounds.
"""

import argparse
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/ lends its batches

import numpy as np

from headrace.backend import lower_program
from headrace.config import OFFLINE, EngineConfig
from headrace.engine.engine import Engine
from headrace.loader.load import load_model, open_model
from headrace.loader.options import engine_config
from headrace.measure.table import print_table
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner import hardware
from headrace.planner.pipeline_picture import idle_share, pipeline_svg
from headrace.planner.roofline import op_seconds, step_seconds
from headrace.program.collective import Collective
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.sampling_params import SamplingParams
from tests.backend.batches import Sequence as Slots
from tests.backend.batches import batch_of
from tests.parallel.test_processes import children

SPLITS = {
    "1 rank, 1 thread": Mesh(),
    "1 rank, 2 threads": Mesh(),
    "tensor 2": Mesh(2),
    "tensor 2, sequence": Mesh(2, sequence=True),
    "tensor 3": Mesh(3),
    "pipeline 2": Mesh(1, 2),
    "tensor 2 x pipeline 2": Mesh(2, 2),
}
STEPS = (1, 2, 4, 8)


def config_of(mesh: Mesh, threads: int = 1, **options: Any) -> EngineConfig:
    sizes = {
        "tensor_parallel_size": mesh.tensor,
        "pipeline_parallel_size": mesh.pipeline,
        "enable_sequence_parallel": mesh.sequence,
    }
    sizes["pipeline_layers"] = mesh.layers
    return engine_config({"threads": threads, "max_model_len": 1024, **sizes, **options}, OFFLINE)


def programs_of(model: str, mesh: Mesh) -> list[Program]:
    """The lowered program of each rank."""
    checkpoint = open_model(model, config_of(mesh))
    own = [
        mesh.program(trace_model(checkpoint.spec, checkpoint.tensors), rank)
        for rank in range(mesh.ranks)
    ]
    return [
        lower_program("cpu", program, weights_of(program, checkpoint.tensors)) for program in own
    ]


def linked(programs: Sequence[Program], size: StepSize) -> int:
    """Max bytes that a rank receives in a step."""
    return max(
        sum(op.link_bytes(size) for op in program.ops if isinstance(op, Collective))
        for program in programs
    )


def run(engine: Engine, seqs: int, prompt: int, tokens: int) -> tuple[list[list[int]], float]:
    """The tokens of requests that are submitted together, and their seconds."""
    rng, begun = np.random.default_rng(seqs), time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for _ in range(seqs):
        engine.add_request(rng.integers(2000, 40000, prompt).tolist(), params)
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for update in engine.step():
            found.setdefault(update.request_id, []).extend(update.token_ids)
    return list(found.values()), time.perf_counter() - begun


WORK: dict[str, tuple[int, int, int, Callable[[float], float]]] = {
    "decode, 1": (1, 8, 32, lambda seconds: 32 / seconds),
    "decode, 8": (8, 8, 32, lambda seconds: 8 * 32 / seconds),
    "prefill, 512": (1, 512, 1, lambda seconds: 512 / seconds),
}
"""(sequences, prompt tokens, output tokens, tokens/s)"""


def ranks(args: argparse.Namespace) -> None:
    options = {"prefix_cache": False, "max_num_seqs": 8}
    engines = {
        name: load_model(
            args.model, config_of(mesh, 2 if "2 threads" in name else 1, **options)
        ).engine
        for name, mesh in SPLITS.items()
    }
    speeds: dict[str, dict[str, list[float]]] = {
        name: {work: [] for work in WORK} for name in SPLITS
    }
    expected: dict[str, list[list[int]]] = {}
    for turn in range(args.rounds + 1):
        for name, engine in engines.items():
            for work, (seqs, prompt, tokens, speed) in WORK.items():
                found, seconds = run(engine, seqs, prompt, tokens)
                assert expected.setdefault(work, found) == found, f"{name} has other tokens"
                if turn:
                    speeds[name][work].append(speed(seconds))
    for engine in engines.values():
        engine.close()
    rows = []
    for name, mesh in SPLITS.items():
        programs = programs_of(args.model, mesh)
        sizes = StepSize(((8, 1),), 1, 2), StepSize(((0, 512),), 1, 2)
        figures = [shown(speeds[name][work], "{:,.0f}") for work in WORK]
        weights = " ".join(f"{program.weight_bytes / 1e6:.1f}" for program in programs)
        rows.append([name, *figures, weights, *(f"{linked(programs, size):,}" for size in sizes)])
    heading = [
        "",
        *(f"{work} tok/s" for work in WORK),
        "MB of weights by rank",
        "B received, 1 row",
        "512 rows",
    ]
    print_table(heading, rows, "Ranks of one thread each: the same tokens")


def evenly(model: str, rows: int) -> Mesh:
    """Two stages with equal predicted times for this number of decoding rows."""
    checkpoint, machine, size = (
        open_model(model, config_of(Mesh())),
        hardware.this_machine(1),
        StepSize(((0, 1),) * rows, rows, 2),
    )
    program = lower_program(
        "cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
    )
    seconds = {
        name: 0.0 for name in ("", *(f"layers.{i}." for i in range(checkpoint.spec.num_layers)))
    }
    for op in program.ops:
        name = next(
            (
                name
                for weight in op.matrices()
                for name in list(seconds)[1:]
                if weight.name.startswith(name)
            ),
            "",
        )
        seconds[name] += op_seconds(op, size, machine)
    head, *layers = seconds.values()
    first = min(range(1, len(layers)), key=lambda n: abs(sum(layers[:n]) - sum(layers[n:]) - head))
    return Mesh(1, 2, layers=(first, len(layers) - first))


def bubble(args: argparse.Namespace) -> None:
    rows = args.rows
    mesh = evenly(args.model, rows)
    engine = load_model(
        args.model, config_of(mesh, kv_blocks=rows * max(STEPS), max_num_batched_tokens=rows)
    ).engine
    executable: Any = engine._loop.executable
    machine, size = hardware.this_machine(1), StepSize(((0, 1),) * rows, rows, 2)
    predicted = [
        1000 * step_seconds(program, size, machine)
        for program in reversed(programs_of(args.model, mesh))  # rank 0 has the last stage
    ]
    of = f"stages of {mesh.layers[0]} and {mesh.layers[1]} layers"
    print(
        f"{rows} rows in a step; {of} are predicted to take {predicted[0]:.1f} and "
        f"{predicted[1]:.1f} ms at least"
    )
    batches = [
        batch_of(
            [Slots([number * rows + i], 32) for i in range(rows)],
            [[100 + number + i] for i in range(rows)],
            [([], [])] * rows,
            False,
        )
        for number in range(max(STEPS))
    ]
    table = []
    for steps in STEPS:
        shares, stage_steps = [], []
        for _ in range(args.rounds + 1):
            executable.stage_steps()
            tickets = [executable.launch(batch) for batch in batches[:steps]]
            for ticket in tickets:
                ticket.wait()
            stage_steps = executable.stage_steps()
            shares.append(idle_share(stage_steps))
        formula = (mesh.pipeline - 1) / (steps + mesh.pipeline - 1)
        found = statistics.median(shares[1:])
        stages = [
            1000 * statistics.median(f.end - f.begin for f in stage_steps if f.rank == rank)
            for rank in (1, 0)
        ]
        table.append(
            [
                f"{steps}",
                f"{formula:.3f}",
                shown(shares[1:], "{:.3f}"),
                f"{found - formula:+.3f}",
                " ".join(f"{ms:.1f}" for ms in stages),
            ]
        )
    engine.close()
    print_table(
        ["steps", "(p - 1) / (m + p - 1)", "idle share", "difference", "ms of a stage"],
        table,
        "Idle time of two stages",
    )
    if args.svg:
        args.svg.write_text(pipeline_svg(f"{steps} steps through two stages", stage_steps))


def lost(args: argparse.Namespace) -> None:
    logging.disable()  # each loss would be told
    table = []
    for name, mesh in (("tensor 2", Mesh(2)), ("pipeline 2", Mesh(1, 2))):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            told, again = [], []
            for _ in range(args.rounds):
                engine = load_model(args.model, config_of(mesh, max_num_seqs=2)).engine
                expected = run(engine, 2, 8, 64)[0]
                rng, params = (
                    np.random.default_rng(2),
                    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
                )
                for _ in range(2):
                    engine.add_request(rng.integers(2000, 40000, 8).tolist(), params)
                found: dict[str, list[int]] = {}
                began = 0.0
                while engine.has_work:
                    failed, updates = engine.stats().failed_steps, engine.step()
                    for update in updates:
                        found.setdefault(update.request_id, []).extend(update.token_ids)
                    if not began:
                        os.kill(children()[0], number)
                        began = time.perf_counter()
                        continue
                    if engine.stats().failed_steps > failed:
                        told.append(time.perf_counter() - began)
                    elif len(told) > len(again) and updates:
                        again.append(time.perf_counter() - began)
                assert list(found.values()) == expected, "other tokens"
                engine.close()
            table.append([name, number.name, shown(told, "{:.2f}"), shown(again, "{:.2f}")])
    print_table(
        ["", "signal", "s until it is found", "s until the next token"],
        table,
        "A rank that is lost under two requests: same tokens",
    )


def shown(values: Sequence[float], form: str) -> str:
    return f"{form} ({form}-{form})".format(statistics.median(values), min(values), max(values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ranks", "bubble", "lost"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128, help="rows of a step of `bubble`")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="file for a picture of the last steps of `bubble`"
    )
    args = parser.parse_args()
    {"ranks": ranks, "bubble": bubble, "lost": lost}[args.what](args)


if __name__ == "__main__":
    main()
