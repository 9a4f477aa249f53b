"""Profile a model op by op: time, bytes, operations, share of what this machine was measured to do,
and what limits each op.

Runs prefills, and single decode steps at several depths and batch sizes, turn by turn; memory
bandwidth and arithmetic are measured between the turns. Every depth is run with the first batch
size, and every batch size at the first depth.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    PARALLEL,
    add_activations,
    add_backend,
    add_json,
    add_kv_dtype,
    add_model,
    add_parallel,
    add_threads,
    whole_number,
    whole_numbers,
)
from headrace.cli.output_file import check_writable, write
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError

if TYPE_CHECKING:
    from headrace.batch import StepTimes
    from headrace.checkpoint.load import Checkpoint
    from headrace.planner.experts import ExpertProfile
    from headrace.planner.hardware import Machine
    from headrace.planner.profile import Phase
    from headrace.planner.report import Report
    from headrace.program.trace import Program

_PREFILL = (512, 2048)
_DEPTH = (128, 2048)
_MOST = 2**20
"""Tokens or sequences that may be asked for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    counts = whole_numbers(1, _MOST)

    def counts_or_none(text: str) -> tuple[int, ...]:
        return () if text == "none" else counts(text)

    for flag, default, what in (
        ("prefill", _PREFILL, "prompt lengths"),
        ("depth", _DEPTH, "tokens of context to decode at"),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(
            f"--{flag}",
            type=counts_or_none,
            metavar="N,...",
            help=f"{what}, or `none` (default: {shown}, where they fit)",
        )
    parser.add_argument(
        "--batch",
        type=counts,
        default="1,4,8,16,32",
        metavar="N,...",
        help="sequences that decode together",
    )
    add_backend(parser)
    add_threads(parser)
    add_kv_dtype(parser)
    add_activations(parser)
    add_parallel(parser)
    parser.add_argument(
        "--turns",
        type=whole_number(1, _MOST),
        default=5,
        metavar="N",
        help="how many times each phase is timed; more make steadier figures",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the roofline with the ops as points"
    )
    parser.add_argument(
        "--experts",
        type=Path,
        metavar="FILE",
        help="draw how many rows went to each expert, all phases together",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table for each phase, or one JSON document; draw the picture if asked to."""
    from headrace.cli.table import print_json

    for flag in ("svg", "experts"):
        if file := getattr(args, flag):
            check_writable(f"--{flag}", file)
    report = examine(args)
    if args.svg:
        from headrace.planner.picture import roofline_svg

        write(
            "--svg",
            args.svg,
            roofline_svg(f"Roofline of {report.spec.name}", report.machine, report.profiles),
        )
    if args.experts:
        from headrace.planner.expert_picture import expert_map_svg

        write(
            "--experts",
            args.experts,
            expert_map_svg(
                f"Experts of {report.spec.name}, rows of a profile", report.expert_loads()
            ),
        )
    if args.json:
        print_json(report.facts())
        return 0
    from headrace.cli.profile_tables import print_report

    print_report(report)
    if args.svg:
        print(f"\nThe roofline is drawn in {args.svg}.")
    if args.experts:
        print(f"\nThe experts are drawn in {args.experts}.")
    return 0


def examine(args: argparse.Namespace) -> "Report":
    """Run the phases, and measure the machine between their turns.

    Raises ModelError as every verb does, MemoryLimitError where not one phase fits in memory, and
    RequestError where none is left to run.
    """
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.loader.backend_choice import with_backend
    from headrace.loader.options import engine_config
    from headrace.model import trace_model
    from headrace.planner.profile import account, phases, typical
    from headrace.planner.report import Report
    from headrace.program.kv import number_bytes
    from headrace.program.moe import Experts

    names = ("backend", "threads", "kv_dtype", "activations", *PARALLEL)
    asked_for = engine_config({name: getattr(args, name) for name in names})
    checkpoint = open_checkpoint(resolve(args.model))
    config = with_backend(asked_for, checkpoint)
    traced = trace_model(checkpoint.spec, checkpoint.tensors)
    _check_context(args, checkpoint.spec.max_context)
    if args.experts and not any(isinstance(op, Experts) for op in traced.ops):
        raise RequestError(f"--experts: {checkpoint.spec.name} has no experts to draw")
    prefill = _PREFILL if args.prefill is None else args.prefill
    depth = _DEPTH if args.depth is None else args.depth
    asked = phases(prefill, depth, args.batch, number_bytes(traced.kv_groups, config.kv_dtype))
    fitting, skipped = _choose(asked, checkpoint, config)
    program, rounds, machines, experts = _run(args.model, checkpoint, config, fitting, args.turns)
    machine = typical(machines)
    profiles = [
        account(phase, program, machine, times)
        for phase, times in zip(fitting, rounds, strict=True)
    ]
    return Report(
        args.model, checkpoint.spec, args.kv_dtype, machines, machine, profiles, skipped, experts
    )


def _check_context(args: argparse.Namespace, context: int) -> None:
    """Refuse lengths that were asked for and that the model does not have; of the default ones
    those that fit are run.
    """
    for flag, most in (("prefill", context), ("depth", context - 1)):
        if (longest := max(getattr(args, flag) or (), default=0)) > most:
            raise RequestError(
                f"--{flag} {longest:,} is too long: the model's context ends at "
                f"{context:,}, so {most:,} is the most"
            )


def _choose(
    asked: "Sequence[Phase]", checkpoint: "Checkpoint", config: EngineConfig
) -> "tuple[list[Phase], dict[str, str]]":
    """The phases that can run here, and why the others cannot, by name."""
    from headrace.backend import lower_program
    from headrace.loader.memory import memory_for
    from headrace.measure.stopwatch import num_blocks
    from headrace.model import trace_model
    from headrace.planner.fit import Fit
    from headrace.planner.hardware import READ_BYTES
    from headrace.program.kv import token_bytes

    spec = checkpoint.spec
    program = lower_program(
        config.backend, trace_model(spec, checkpoint.tensors), checkpoint.tensors
    )
    kv_per_token, block_size = (
        token_bytes(program.kv_groups, config.kv_dtype),
        config.traits.kv_block_size,
    )
    memory = memory_for(config, program)
    fit = Fit(
        memory.available,
        program.weight_bytes,
        spec.max_context * kv_per_token,
        spec.max_context,
        memory.to_run,
    )
    budget = fit.kv_budget - READ_BYTES
    if budget <= 0:
        raise MemoryLimitError(
            f"{program.weight_bytes:,} bytes of weights leave too little of the "
            f"{fit.memory:,} bytes that are "
            f"{'free on the GPU' if memory.on_gpu else 'available'}: "
            f"the model is too large for this {'GPU' if memory.on_gpu else 'machine'}"
        )
    fitting, skipped, short = [], {}, 0
    for phase in asked:
        needed = (
            num_blocks(phase, block_size) * block_size * kv_per_token
            + 4 * phase.seqs * spec.vocab_size
        )
        if phase.length > spec.max_context:
            skipped[phase.name] = (
                f"needs {phase.length:,} tokens of context, and the model's ends at "
                f"{spec.max_context:,}"
            )
        elif needed > budget:
            skipped[phase.name] = (
                f"needs {needed:,} bytes for KV and logits, and {budget:,} are left "
                "beside the weights"
            )
            short += 1
        else:
            fitting.append(phase)
    if not fitting:
        why = (
            "; ".join(f"{name} {reason}" for name, reason in skipped.items())
            or "give --prefill, or --depth and --batch"
        )
        raise (MemoryLimitError if short else RequestError)(f"nothing to profile: {why}")
    return fitting, skipped


def _run(
    model: str,
    checkpoint: "Checkpoint",
    config: EngineConfig,
    fitting: "Sequence[Phase]",
    turns: int,
) -> "tuple[Program, list[list[list[StepTimes]]], list[Machine], list[ExpertProfile]]":
    """The program as it ran, the times of every phase (rounds of steps), the machine before each
    turn and at the end, and the routing of every phase where the model has experts.

    The phases take turns, so that another program that is busy for a while slows a part of each,
    which its median hides.
    """
    from rich.console import Console
    from rich.progress import Progress

    from headrace.measure.stopwatch import Stopwatch, num_blocks
    from headrace.planner.experts import expert_profile
    from headrace.planner.hardware import measure
    from headrace.program.moe import Experts

    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("loading", total=turns * len(fitting) + 1)
        stopwatch = Stopwatch(
            model,
            checkpoint,
            config,
            max(num_blocks(phase, config.traits.kv_block_size) for phase in fitting),
        )
        try:
            rounds: list[list[list[StepTimes]]] = [[] for _ in fitting]
            machines = []
            for _ in range(turns):
                machines.append(measure(config.threads, config.backend))
                for phase, times in zip(fitting, rounds, strict=True):
                    bar.update(task, advance=1, description=phase.name)
                    times += stopwatch.turn(phase)
            program = stopwatch.executable.program
            routed = fitting if any(isinstance(op, Experts) for op in program.ops) else ()
            experts = [
                expert_profile(phase, program, stopwatch.expert_rows(phase)) for phase in routed
            ]
            return program, rounds, [*machines, measure(config.threads, config.backend)], experts
        finally:
            stopwatch.close()
