"""Measure whether speculative decoding saves time for a model on this machine, and how deep to
draft.

The model writes a text, and each draft model predicts every token of it. A draft model is the
first layers of the model itself, or a smaller model. Acceptance and step times give the expected
speed; the best draft model is then timed against plain decoding.
"""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    add_backend,
    add_json,
    add_model,
    add_threads,
    whole_number,
    whole_numbers,
)
from headrace.cli.terminal import show_status
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.calibrate import Calibration, MeasuredDraft

EXAMPLES = """\
  headrace calibrate smollm2
  headrace calibrate MODEL --draft-model SMALLER_MODEL --prompt "def main():"
  headrace calibrate MODEL --layers 6,12 --depth 4 --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    draft = parser.add_argument_group("draft models")
    draft.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="smaller model with the same vocabulary, measured as well",
    )
    draft.add_argument(
        "--layers",
        metavar="N,...",
        type=whole_numbers(1, 2**12),
        default=(),
        help="numbers of first layers to measure (default: eighths of all layers)",
    )
    draft.add_argument(
        "--depth",
        type=whole_number(1, 64),
        metavar="K",
        default=8,
        help="maximum number of draft tokens in a row",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt",
        metavar="TEXT",
        help="start of the text; a typical prompt of your application gives the best estimate "
        "(default: a story)",
    )
    text.add_argument(
        "--tokens",
        type=whole_number(16, 2**20),
        metavar="N",
        default=192,
        help="length of the text, in tokens",
    )
    compute = parser.add_argument_group("compute")
    add_backend(compute)
    add_threads(compute)
    add_json(parser.add_argument_group("output"))


def run(args: argparse.Namespace) -> int:
    from headrace.measure.calibrate import PROMPT, calibrate
    from headrace.measure.table import print_json

    for flag in ("prompt", "draft-model"):
        if getattr(args, flag.replace("-", "_")) == "":
            raise RequestError(f"--{flag} is empty; write a text, or leave it out")
    try:
        calibration = calibrate(
            args.model,
            draft_model=args.draft_model or "",
            layers=args.layers,
            prompt=args.prompt or PROMPT,
            tokens=args.tokens,
            max_depth=args.depth,
            backend=args.backend,
            threads=args.threads,
            on_progress=lambda step, share: show_status(step),
        )
    finally:
        show_status("")
    if args.json:
        print_json(calibration.facts())
    else:
        _print(calibration)
    return 0


def _print(calibration: "Calibration") -> None:
    from headrace.measure.table import print_table

    print_table(
        ["draft model", ">acceptance", ">cost", ">depth", ">tokens/step", ">speed"],
        [_row(draft) for draft in calibration.drafts],
    )
    print(
        "\nacceptance: share of accepted draft tokens; cost: of a draft token, in plain steps; "
        "depth: the fastest; tokens/step, speed: expected at that depth"
    )
    trial = calibration.trial
    if trial is None:
        print(
            "None of these saves time here: leave the proposer off, or try a smaller model or a "
            "model that was trained to exit early."
        )
        return
    options = ", ".join(f"{name}={value!r}" for name, value in trial.options.items())
    print(
        f"{calibration.best.name}, measured: {trial.tokens_per_step:.2f} tokens/step, "
        f"{trial.speed:.2f}x ({trial.spread}, {len(trial.speedups)} runs in turns)"
    )
    print(f"Suggestion: {options}")


def _row(draft: "MeasuredDraft") -> list[str]:
    best, cost = draft.best, draft.costs.draft / draft.costs.target[0]
    return [
        draft.name,
        f"{draft.acceptance:.0%}",
        f"{cost:.2f}",
        str(best.depth),
        f"{best.tokens:.2f}",
        f"{best.speedup:.2f}x",
    ]
