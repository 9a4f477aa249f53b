"""Measure what a model, or a way to quantise it, costs in quality: on a text, beside a reference,
next to bytes and speed.

NLL is the mean negative log-likelihood of a token of the text given those before it, in nats. KL is
the divergence of the model's distributions of the next token from the reference's, mean and 99th
percentile; `same top` is how often both hold the same token for the likeliest. With --formats the
matrices of the model are also rounded to each of these formats, for a row of its own; --sweep says
which of them nothing surpasses, and --budget which one fits best.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    add_activations,
    add_backend,
    add_json,
    add_kv_dtype,
    add_model,
    add_threads,
    whole_number,
)
from headrace.cli.calibrating import MOST_TOKENS, add_calibration

if TYPE_CHECKING:
    from headrace.measure.evaluation import Row


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="another model of the same vocabulary, or `exact`: the model's own weights, "
        "computed in float64 (slow); with --formats, "
        "if left out, the model as it is",
    )
    parser.add_argument(
        "--formats",
        metavar="NAME,...",
        help="round the model's matrices to these formats too, such as int4-g128,w8a8",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="try several formats, or those of --formats, and name the best of them",
    )
    parser.add_argument(
        "--budget", metavar="SIZE", help="with --sweep: name the best within 2GB, 300MB or 50tok/s"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="with --sweep: draw quality against speed"
    )
    parser.add_argument(
        "--by-layer", action="store_true", help="how much of its output each layer loses by itself"
    )
    add_calibration(parser)
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="the text; if left out, a part of Python's language reference",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(2, MOST_TOKENS),
        default=4096,
        metavar="N",
        help="tokens of the text that count",
    )
    add_kv_dtype(parser)
    add_activations(parser)
    add_backend(parser)
    add_threads(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table, or one JSON document."""
    from rich.console import Console
    from rich.progress import Progress

    from headrace.cli.output_file import check_writable, write
    from headrace.cli.table import print_json
    from headrace.errors import RequestError
    from headrace.measure.evaluation import Evaluation
    from headrace.measure.frontier import advice, frontier, read_budget

    for flag in ("budget", "svg"):
        if getattr(args, flag) and not args.sweep:
            raise RequestError(f"--{flag} goes with --sweep")
    budget = read_budget(args.budget) if args.budget else None
    if args.svg:
        check_writable("--svg", args.svg)
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        rows = Evaluation(args, bar).rows()
    best = frontier(rows) if args.sweep else []
    if args.json:
        named = {"frontier": best} if args.sweep else {}
        print_json(
            {
                "rows": [facts(row) for row in rows],
                **named,
                **({"best": advice(rows, budget)} if budget else {}),
            }
        )
    else:
        _print(rows)
        if args.sweep:
            print(f"\nNothing surpasses these in quality and speed at once: {', '.join(best)}.")
        if budget:
            print(f"Within {args.budget} the least is lost by {advice(rows, budget)}.")
    if args.svg:
        from headrace.measure.frontier_picture import frontier_svg

        write("--svg", args.svg, frontier_svg(f"Formats of {args.model}", rows, "KL, nats"))
    return 0


def facts(row: "Row") -> dict[str, object]:
    """A row as JSON."""
    quality = {**vars(row.quality), "perplexity": row.quality.perplexity}
    return {**row._asdict(), "quality": quality}


def cells(row: "Row") -> list[str]:
    """A row of the table."""
    q = row.quality
    compared = ["", "", ""]
    if q.kl is not None and q.kl_99 is not None and q.agreement is not None:
        compared = [f"{q.kl:.4f}", f"{q.kl_99:.3f}", f"{q.agreement:.1%}"]
    first = [
        row.name,
        f"{row.weight_bytes / 1e6:,.0f}",
        f"{row.bits:.2f}",
        f"{q.nll:.4f}",
        f"{q.perplexity:.2f}",
    ]
    return [*first, *compared, f"{row.prefill:,.0f}", f"{row.decode:,.1f}"]


def _print(rows: "Sequence[Row]") -> None:
    from headrace.cli.table import print_table

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
    print_table(
        headings, [cells(row) for row in rows], f"{rows[0].quality.tokens:,} tokens of text"
    )
    judged = [row for row in rows if row.layer_errors]
    if judged:
        print()
        lines = [
            [str(layer), *(f"{row.layer_errors[layer]:.1%}" for row in judged)]
            for layer in judged[0].layer_errors
        ]
        print_table(
            ["layer", *(f">{row.name}" for row in judged)],
            lines,
            "what each layer loses of its output by itself",
        )
