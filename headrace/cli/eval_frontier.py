"""`headrace eval --frontier`: the table, the picture and the sentence of advice."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import model_options
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.frontier_run import Frontier, Point

_DEPTH = 1024


def run_frontier(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable, write
    from headrace.cli.progress import progress_bar
    from headrace.measure.frontier_run import measure_frontier
    from headrace.measure.table import print_json

    for flag in ("sweep", "budget", "by_layer", "reference"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise RequestError(f"--{name} does not belong to --frontier; leave one of both out")
    if args.svg:
        check_writable("--svg", args.svg)

    with progress_bar() as on_progress:
        frontier = measure_frontier(
            args.model,
            formats=[name for name in (args.formats or "").split(",") if name],
            files=dict(args.form),
            text=args.text,
            tokens=args.tokens,
            depth=args.depth or _DEPTH,
            quick=args.quick,
            on_progress=on_progress,
            **model_options(args),
        )
    if args.svg:
        write("--svg", args.svg, frontier_picture(frontier))
    if args.json:
        print_json(frontier.facts())
    else:
        print_frontier(frontier)
    return 0


def frontier_picture(frontier: "Frontier") -> str:
    from headrace.measure.frontier_picture import Bar, frontier_svg

    return frontier_svg(
        f"Forms of {frontier.model} at a depth of {frontier.depth:,} tokens",
        frontier.points,
        "KL, nats",
        area={point.name: point.step_bytes for point in frontier.points},
        area_label="bytes that a token reads",
        bars={
            point.name: Bar(
                point.draft.gain.speedup,
                f"{point.draft.gain.speedup:.2f}, {point.draft.acceptance:.0%}",
            )
            for point in frontier.points
            if point.draft
        },
    )


def print_frontier(frontier: "Frontier") -> None:
    from headrace.measure.table import print_table

    best = frontier.best
    headings = [
        "form",
        "",
        ">MB a token",
        ">tokens/s",
        ">of full",
        ">NLL",
        ">KL",
        ">same top",
        ">accepted",
        ">as a draft",
        ">deep",
    ]
    title = (
        f"{frontier.tokens:,} tokens of text, in pieces of {frontier.depth:,}; speeds at this depth"
    )
    print_table(headings, [_cells(point, best) for point in frontier.points], title)
    print("\n* on the frontier of speed and KL; `as a draft`: speed over plain decoding, exactly.")
    for name, reason in frontier.left_out.items():
        print(f"{name} is left out: {reason}")
    print(f"\n{frontier.advice}")


def _cells(point: "Point", best: list[str]) -> list[str]:
    quality, drafted = point.quality, ["", "", ""]
    if point.draft:
        gain = point.draft.gain
        drafted = [f"{point.draft.acceptance:.0%}", f"{gain.speedup:.2f}", f"{gain.depth}"]
    return [
        point.name,
        "*" if point.name in best else "",
        f"{point.step_bytes / 1e6:,.1f}",
        f"{point.decode:,.1f}",
        f"{point.gain:.2f}",
        f"{quality.nll:.4f}",
        f"{point.loss:.4f}",
        f"{quality.agreement or 0.0:.1%}",
        *drafted,
    ]
