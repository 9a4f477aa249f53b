"""`headrace eval --frontier`: the table, the picture and the sentence of advice."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import MAX_TOKENS, model_options, whole_number
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.frontier_points import Frontier, Point

_DEPTH = 1024


def add_frontier(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--frontier",
        action="store_true",
        help="bytes, speed and loss of --formats, or of the usual formats, and of all lossy modes, "
        "each also as an exact draft",
    )
    group.add_argument(
        "--depth",
        type=whole_number(2, MAX_TOKENS),
        metavar="N",
        help="with --frontier: context of the timed tokens, and length of a piece of text "
        "(default: 1024)",
    )
    group.add_argument(
        "--form",
        type=_form,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="with --frontier: another file of the model as a form, or a calibration file, in "
        "place of the usual form of this name; may be repeated",
    )
    group.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="with --frontier: folder for results and converted files, which another run completes",
    )
    group.add_argument(
        "--only",
        choices=("quality", "speed"),
        help="with --keep: part to measure now (default: both)",
    )
    group.add_argument(
        "--quick", action="store_true", help="with --frontier: fewer forms, and fewer steps of each"
    )


def _form(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not NAME=FILE")
    return name, file


def run_frontier(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable, write
    from headrace.cli.progress import progress_bar
    from headrace.measure.frontier_run import PARTS, measure_frontier
    from headrace.measure.table import print_json

    for flag in ("sweep", "budget", "by_layer", "reference"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise RequestError(f"--{name} does not belong to --frontier; leave one of both out")
    if args.only and not args.keep:
        raise RequestError(
            "--only measures a part of a table, so the results must be kept; add --keep FOLDER"
        )
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
            keep=args.keep,
            parts=(args.only,) if args.only else PARTS,
            on_progress=on_progress,
            **model_options(args),
        )
    if args.svg and frontier.complete:
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
        frontier.complete,
        "KL, nats",
        area={point.name: point.step_bytes for point in frontier.complete},
        area_label="bytes that a token reads",
        bars={
            point.name: Bar(draft.speedup, f"{draft.speedup:.2f}, {_share(point)}")
            for point in frontier.complete
            if (draft := point.draft)
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
    score, speed, draft = point.score, point.speed, point.draft
    early = score.early if score else None
    return [
        point.name + (f" ({early.share:.0%} leave)" if early else ""),
        "*" if point.name in best else "",
        f"{point.step_bytes / 1e6:,.1f}" if score else "",
        *([f"{point.decode:,.1f}", f"{point.gain:.2f}"] if speed else ["", ""]),
        f"{score.quality.nll:.4f}" if score else "",
        f"{point.loss:.4f}" if score else "",
        f"{score.quality.agreement or 0.0:.1%}" if score else "",
        _share(point),
        *([f"{draft.speedup:.2f}", f"{draft.depth}"] if draft else ["", ""]),
    ]


def _share(point: "Point") -> str:
    """The share of drafted tokens that are accepted; empty for forms that do not draft."""
    if not point.score or point.score.acceptance is None:
        return ""
    return f"{point.score.acceptance:.0%}"
