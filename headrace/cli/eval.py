"""Evaluate the quality of a model on a text, next to its bytes and its speed.

NLL is the mean negative log-likelihood of a token of the text given the tokens before it, in nats.
KL is the divergence of the next-token distributions from a reference: mean and 99th percentile.
`same top` is the share of positions at which both have the same most likely token.

--formats quantises the matrices of the model to each of these formats, for a row each. --sweep
prints the Pareto-optimal formats, and --budget the best format within a size or a speed. --frontier
adds the lossy modes, and measures each form as an exact draft of the full model, too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    MAX_TOKENS,
    add_calibration,
    add_compute,
    add_json,
    add_model,
    add_modes,
    model_options,
    whole_number,
)
from headrace.cli.eval_frontier import add_frontier, run_frontier

if TYPE_CHECKING:
    from headrace.measure.evaluate import Evaluation

EXAMPLES = """\
  headrace eval smollm2 --formats int8-g64,int4-g64
  headrace eval smollm2 --sweep --budget 80MB --svg formats.svg
  headrace eval smollm2 --frontier --svg frontier.svg
  headrace eval model-q4.gguf --reference model-f16.gguf --text wiki.txt"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    formats = parser.add_argument_group("formats")
    formats.add_argument(
        "--formats",
        metavar="NAME,...",
        help="formats to quantise the matrices to, such as int4-g128,w8a8",
    )
    formats.add_argument(
        "--sweep",
        action="store_true",
        help="evaluation of --formats, or of the usual formats, with their Pareto frontier",
    )
    formats.add_argument(
        "--budget",
        metavar="SIZE",
        help="with --sweep: maximum size or minimum speed, such as 2GB, 300MB or 50tok/s",
    )
    add_frontier(formats)
    formats.add_argument(
        "--by-layer", action="store_true", help="relative error of the output of each layer"
    )
    formats.add_argument(
        "--reference",
        metavar="MODEL",
        help="model with the same vocabulary to compare with, or `exact`: the model's own weights "
        "in float64 (slow) (default with --formats: the model itself)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to evaluate on (default: a part of Python's language reference)",
    )
    text.add_argument(
        "--tokens",
        type=whole_number(2, MAX_TOKENS),
        default=4096,
        metavar="N",
        help="length of the text, in tokens",
    )
    add_calibration(parser)
    add_compute(parser)
    add_modes(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="with --sweep or --frontier: SVG file for a picture of quality against speed",
    )
    add_json(output)


def run(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable, write
    from headrace.measure.frontier import best_within, pareto_frontier, parse_budget
    from headrace.measure.table import print_json

    if args.frontier:
        return run_frontier(args)
    _check_flags(args)
    budget = parse_budget(args.budget) if args.budget else None
    if args.svg:
        check_writable("--svg", args.svg)

    rows = _evaluate(args)
    frontier = pareto_frontier(rows) if args.sweep else []
    if args.json:
        facts: dict[str, object] = {"rows": [_facts(row) for row in rows]}
        if args.sweep:
            facts["frontier"] = frontier
        if budget:
            facts["best"] = best_within(rows, budget)
        print_json(facts)
    else:
        _print(rows)
        if args.sweep:
            print(f"\nPareto-optimal in quality and speed: {', '.join(frontier)}.")
        if budget:
            print(f"Best quality within {args.budget}: {best_within(rows, budget)}.")
    if args.svg:
        from headrace.measure.frontier_picture import frontier_svg

        write("--svg", args.svg, frontier_svg(f"Formats of {args.model}", rows, "KL, nats"))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise RequestError for a flag of another evaluation."""
    from headrace.errors import RequestError

    for flag in ("depth", "form", "quick", "keep", "only"):
        if getattr(args, flag):
            raise RequestError(f"--{flag} needs --frontier; add it")
    for flag, needed in (("budget", "--sweep"), ("svg", "--sweep or --frontier")):
        if getattr(args, flag) and not args.sweep:
            raise RequestError(f"--{flag} needs {needed}; add it")


def _evaluate(args: argparse.Namespace) -> "list[Evaluation]":
    from headrace.cli.progress import progress_bar
    from headrace.measure.evaluate import SWEEP_FORMATS, evaluate

    formats = [name for name in (args.formats or "").split(",") if name]
    with progress_bar() as on_progress:
        return evaluate(
            args.model,
            formats=formats or (SWEEP_FORMATS if args.sweep else ()),
            reference=args.reference,
            text=args.text,
            tokens=args.tokens,
            length=args.length,
            method=args.method,
            calibration_text=args.calibration,
            calibration_tokens=args.calibration_tokens,
            by_layer=args.by_layer,
            on_progress=on_progress,
            **model_options(args),
        )


def _facts(row: "Evaluation") -> dict[str, object]:
    quality = vars(row.quality) | {"perplexity": row.quality.perplexity}
    return vars(row) | {"quality": quality}


def _cells(row: "Evaluation") -> list[str]:
    quality = row.quality
    compared = ["", "", ""]
    if quality.kl is not None and quality.kl_99 is not None and quality.agreement is not None:
        compared = [f"{quality.kl:.4f}", f"{quality.kl_99:.3f}", f"{quality.agreement:.1%}"]
    return [
        row.name,
        f"{row.weight_bytes / 1e6:,.0f}",
        f"{row.bits:.2f}",
        f"{quality.nll:.4f}",
        f"{quality.perplexity:.2f}",
        *compared,
        f"{row.prefill:,.0f}",
        f"{row.decode:,.1f}",
    ]


def _print(rows: "Sequence[Evaluation]") -> None:
    from headrace.measure.table import print_table

    headings = [
        "",
        ">MB",
        ">bits",
        ">NLL",
        ">perplexity",
        ">KL",
        ">99th",
        ">same top",
        ">prefill, tokens/s",
        ">decode",
    ]
    title = f"{rows[0].quality.tokens:,} tokens of text"
    print_table(headings, [_cells(row) for row in rows], title)

    by_layer = [row for row in rows if row.layer_errors]
    if by_layer:
        print()
        lines = [
            [str(layer), *(f"{row.layer_errors[layer]:.1%}" for row in by_layer)]
            for layer in by_layer[0].layer_errors
        ]
        headings = ["layer", *(f">{row.name}" for row in by_layer)]
        print_table(headings, lines, "relative error of the output of each layer")
