"""`headrace calibrate --early-exit`: the exit of a model within a bound, and its file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import DEFAULT_MODEL, number
from headrace.cli.output_file import check_writable
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.early_exit import ExitCalibration

_OUTPUT = Path("early_exit.json")


def add_early_exit(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "early exit",
        "A lossy mode: clear tokens leave after the first layers. The model reads a text, and the\n"
        "result is a file for --early-exit of other commands.",
    )
    group.add_argument(
        "--early-exit",
        type=number(0, 1),
        metavar="D",
        help="maximum share of tokens that differ from the full model's, such as 0.05, in place of "
        "drafts",
    )
    group.add_argument(
        "--error-probability",
        type=number(0, 1),
        default=0.05,
        metavar="E",
        help="probability that the share is larger, in windows that are drawn from the same text "
        "(default: 0.05)",
    )
    group.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text like those of your application (default: Python's language reference)",
    )
    group.add_argument(
        "--output",
        type=Path,
        default=_OUTPUT,
        metavar="FILE",
        help=f"calibration file to write (default: {_OUTPUT})",
    )


def run_early_exit(args: argparse.Namespace) -> int:
    """Calibrate the exit of a model, and write its file."""
    from headrace.cli.progress import progress_bar
    from headrace.measure.early_exit import TOKENS, calibrate_early_exit
    from headrace.measure.table import print_json

    options = ("draft_model", "prompt", "layers")
    if given := [name.replace("_", "-") for name in options if getattr(args, name)]:
        raise RequestError(
            f"--early-exit reads a text without drafts; leave out: {', '.join(given)}"
        )
    check_writable("--output", args.output)
    with progress_bar() as on_progress:
        calibration = calibrate_early_exit(
            args.model or DEFAULT_MODEL,
            args.early_exit,
            error_probability=args.error_probability,
            text=args.text,
            tokens=args.tokens or TOKENS,
            backend=args.backend,
            threads=args.threads,
            on_progress=on_progress,
        )
    if calibration.chosen is None:
        raise RequestError(
            f"no exit keeps {args.early_exit:.1%} disagreement with probability "
            f"{1 - args.error_probability:.0%} on this text; allow more, or use a longer text"
        )
    calibration.write(args.output)
    if args.json:
        facts = calibration.facts()
        print_json({name: value for name, value in facts.items() if name != "map"})
    else:
        _print(calibration, args.output)
    return 0


def _print(calibration: "ExitCalibration", file: Path) -> None:
    from headrace.measure.table import print_figures

    chosen = calibration.chosen
    assert chosen
    early_exit = chosen.early_exit
    print_figures(
        "Early exit",
        {
            "exit": f"after {early_exit.num_layers} of {chosen.num_layers} layers, if the best "
            f"token leads by {early_exit.min_margin:.3f}",
            "tokens that leave": f"{chosen.exits:.1%}",
            "layers saved": f"{chosen.layers_saved:.1%}",
            "disagreement": f"{chosen.disagreement:.2%} measured; the bound is "
            f"{calibration.max_disagreement:.1%}",
            "loss": f"KL {chosen.kl:.4f} nats, NLL {chosen.nll - chosen.nll_full:+.4f}",
            "text": f"{calibration.text}: {calibration.fitting_tokens:,} tokens fitted the map of "
            f"the exit, {calibration.calibration_tokens:,} tested it, {chosen.tokens:,} measured",
            "file": str(file),
        },
    )
