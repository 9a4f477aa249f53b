"""Measure a model on this machine from naive inference to all techniques, one rung at a time, and
name the settings to run.

All rungs do the same work on the CPU. Slow rungs do an evenly spread part of it, and their figures
are scaled by tokens. Tokens are compared wherever they must be equal.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_json, add_model, add_price, add_threads

if TYPE_CHECKING:
    from headrace.measure.climb_results import Climb, Step

EXAMPLES = """\
  headrace climb
  headrace climb smollm2 --svg climb.svg --price 0.40
  headrace climb model.gguf --quick --json"""


_NOTES = """\
~: scaled by tokens from a part of the work. first token: median of a request that is alone; all at
once: median if all requests come together. NLL: change from float32, and KL from float32, in nats.
tokens: compared with earlier rungs of the same kernels and number formats."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a sixth of the output tokens, and shorter parts and texts",
    )
    add_price(parser)
    add_threads(parser.add_argument_group("compute"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--svg", type=Path, metavar="FILE", help="SVG file for a picture of the rungs"
    )
    add_json(output)


def run(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable, write
    from headrace.cli.progress import progress_bar
    from headrace.cli.terminal import print_stderr
    from headrace.errors import HeadraceError
    from headrace.measure.climb import climb
    from headrace.measure.climb_picture import climb_svg, speed_text
    from headrace.measure.table import print_json

    if args.svg:
        check_writable("--svg", args.svg)

    def show_step(step: "Step") -> None:
        if not sys.stderr.isatty():
            print_stderr(f"{step.rung.name}: {speed_text(step)} tokens/s")

    with progress_bar() as on_progress:
        found = climb(
            args.model,
            quick=args.quick,
            threads=args.threads,
            on_progress=on_progress,
            on_step=show_step,
        )
    if args.json:
        print_json(found.facts(args.price))
    else:
        _print(found, args.price)
    if args.svg:
        write("--svg", args.svg, climb_svg(found))
    if found.differences:
        raise HeadraceError(
            f"tokens differ where they must be equal: {'; '.join(found.differences)}; please "
            "report it with the output of `headrace --version`"
        )
    return 0


def _print(climb: "Climb", price: float | None) -> None:
    from headrace.measure.table import print_table

    headings = [
        "rung",
        ">tokens/s",
        ">of first",
        ">of base",
        ">first token",
        ">all at once",
        ">memory",
        ">NLL",
        ">KL",
        "tokens",
    ]
    rows = [_cells(climb, step) for step in climb.steps]
    if price is not None:
        headings.append(">$/M tokens")
        rows = [
            [*row, f"{climb.cost(step, price):.3g}"]
            for row, step in zip(rows, climb.steps, strict=True)
        ]
    title = (
        f"{climb.name} ({climb.format}), {climb.requests} requests: {climb.prompt_tokens:,} prompt "
        f"tokens, {climb.output_tokens:,} output tokens; {climb.machine.cpu}, "
        f"{climb.machine.at_work}"
    )
    print_table(headings, rows, title)
    for name, reason in climb.left_out.items():
        print(f"left out: {name}: {reason}")
    print(f"\n{_NOTES}")
    print(f"Limit of this machine for everything, without drafts: {climb.limit:,.0f} tokens/s.\n")
    print(climb.advice.sentence)


def _cells(climb: "Climb", step: "Step") -> list[str]:
    from headrace.measure.climb_picture import factor_text, speed_text
    from headrace.measure.table import size

    base = climb.factor(step, step.rung.base)
    quality = step.quality
    is_lossy = step.nll_rise is not None and "kl" in quality
    same = "DIFFER" if step.difference else "equal" if step.same_as else ""
    return [
        step.rung.name,
        speed_text(step),
        factor_text(climb.factor(step, climb.steps[0].rung.name) or 1.0),
        "" if base is None else factor_text(base),
        _seconds(step.first_token),
        _seconds(step.first_token_of_all),
        size(step.measured.peak_memory),
        f"{step.nll_rise:+.4f}" if is_lossy else "",
        f"{quality['kl']:.4f}" if is_lossy else "",
        same,
    ]


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:,.1f} ms"
    return f"{seconds:,.1f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
