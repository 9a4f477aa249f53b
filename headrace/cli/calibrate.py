"""Measure which drafter saves time for a model on this machine, and how deep to draft; or the early
exit of a model; or with `--machine` the speed of this machine's kernels.

The model writes a text, and sets of its own layers predict every token of it. The best set, the
suffix tree, layers for drafts in the model's files, and the draft models and Medusa heads that you
name are then timed against plain decoding, with 1, 4 and 16 sequences at once. The suggestion was
faster for one sequence in each of three rounds, and at least 0.97 times as fast as plain decoding
for more.

`--early-exit` finds where clear tokens may leave, in place of drafts, and writes a file for the
lossy option of the same name.

`--machine` takes about two minutes and no model. `headrace plan` uses the result, which is stored.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    DEFAULT_MODEL,
    add_backend,
    add_json,
    add_model,
    add_threads,
    whole_number,
    whole_numbers,
)
from headrace.cli.calibrate_exit import add_early_exit, run_early_exit
from headrace.cli.terminal import show_status
from headrace.config import EngineConfig
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.calibrate import Calibration, MeasuredDraft
    from headrace.measure.drafters import MeasuredDrafter
    from headrace.planner.calibration import Calibration as MachineCalibration

EXAMPLES = """\
  headrace calibrate smollm2
  headrace calibrate MODEL --draft-model SMALLER_MODEL --prompt "def main():"
  headrace calibrate MODEL --draft-model EAGLE3_FOLDER --medusa-heads heads.safetensors
  headrace calibrate MODEL --layers 6,12 --depth 4 --json
  headrace calibrate MODEL --early-exit 0.05 --text chats.txt --output exit.json
  headrace calibrate --machine"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    parser.set_defaults(model=None)  # `--machine` has none
    parser.add_argument(
        "--machine",
        action="store_true",
        help="speed of this machine's kernels for `headrace plan`, in place of drafts",
    )
    draft = parser.add_argument_group("drafters")
    draft.add_argument(
        "--draft-model",
        metavar="MODEL",
        action="append",
        default=[],
        help="smaller model, or folder of an EAGLE drafter, measured as well; may be given again",
    )
    draft.add_argument(
        "--medusa-heads",
        metavar="FILE",
        help="file or folder of Medusa heads, measured as well",
    )
    draft.add_argument(
        "--layers",
        metavar="N,...",
        type=whole_numbers(1, 2**12),
        default=(),
        help="numbers of first layers to measure (default: eighths of all, and sets of any layers, "
        "found by leaving out those that cost the least acceptance)",
    )
    draft.add_argument(
        "--depth",
        type=whole_number(1, 64),
        metavar="K",
        default=8,
        help="maximum number of draft tokens in a row",
    )
    sparsity = parser.add_argument_group("activation sparsity")
    sparsity.add_argument(
        "--sparsity",
        type=float,
        metavar="SHARE",
        help="share of activations to set to 0, between 0 and 1: writes the thresholds for "
        "activation_sparsity with their price, in place of drafts",
    )
    sparsity.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the thresholds (default: sparsity-SHARE.json in this folder)",
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
        help="length of the text, in tokens (default: 256; with --early-exit 65536)",
    )
    add_early_exit(parser)
    compute = parser.add_argument_group("compute")
    add_backend(compute)
    add_threads(compute)
    add_json(parser.add_argument_group("output"))


def run(args: argparse.Namespace) -> int:
    if args.machine:
        return _calibrate_machine(args)
    if args.early_exit is not None:
        return run_early_exit(args)
    if args.sparsity is not None:
        return _calibrate_sparsity(args)
    from headrace.measure.calibrate import PROMPT, TOKENS, calibrate
    from headrace.measure.table import print_json

    for flag in ("prompt", "draft-model", "medusa-heads"):
        if getattr(args, flag.replace("-", "_")) in ("", [""]):
            raise RequestError(f"--{flag} is empty; write a text, or leave it out")
    try:
        calibration = calibrate(
            args.model or DEFAULT_MODEL,
            draft_model=args.draft_model,
            medusa_heads=args.medusa_heads or "",
            layers=args.layers,
            prompt=args.prompt or PROMPT,
            tokens=args.tokens or TOKENS,
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


def _calibrate_sparsity(args: argparse.Namespace) -> int:
    from headrace.cli.progress import progress_bar
    from headrace.measure.activation_sparsity import calibrate_sparsity
    from headrace.measure.table import print_json, print_table

    file = args.out or Path(f"sparsity-{args.sparsity:g}.json")
    with progress_bar() as on_progress:
        found = calibrate_sparsity(
            args.model or DEFAULT_MODEL,
            args.sparsity,
            file,
            backend=args.backend,
            threads=args.threads,
            on_progress=on_progress,
        )
    rows = [(name, getattr(found, name)) for name in ("full", "sparse")]
    if args.json:
        facts = {
            name: {"nll": row.quality.nll, "kl": row.quality.kl, "decode": row.decode}
            for name, row in rows
        }
        print_json({"file": str(file), "sparsity": found.sparsity, **facts})
        return 0
    print_table(
        ["model", ">NLL", ">KL", ">tokens/s"],
        [
            [name, f"{row.quality.nll:.4f}", f"{row.quality.kl or 0:.4f}", f"{row.decode:.1f}"]
            for name, row in rows
        ],
    )
    print(f"\nThresholds: {file}. Use them with --activation-sparsity {file}")
    return 0


def _calibrate_machine(args: argparse.Namespace) -> int:
    from headrace.cli.progress import progress_bar
    from headrace.measure.machine_calibration import calibrate_machine
    from headrace.measure.table import print_json
    from headrace.planner.calibration import calibration_facts, store_calibration

    options = ("model", "draft_model", "medusa_heads", "prompt", "layers", "early_exit")
    given = [name for name in options if getattr(args, name) not in (None, "", (), [])]
    if given or args.backend != EngineConfig.backend:
        names = ", ".join(name.replace("_", "-") for name in given or ["backend"])
        raise RequestError(f"--machine measures this CPU without a model; leave out: {names}")
    with progress_bar() as on_progress:
        found = calibrate_machine(threads=args.threads, on_progress=on_progress)
    is_stored = store_calibration(found, args.threads)
    if args.json:
        print_json(calibration_facts(found))
        return 0
    _print_speeds(found)
    if not is_stored:
        raise RequestError("the result cannot be stored: set HEADRACE_CACHE to a writable folder")
    return 0


def _print_speeds(found: "MachineCalibration") -> None:
    from headrace.measure.table import print_figures, print_table, size

    rows = [
        [
            part,
            f"{bits:g}",
            f"{reach.seconds * 1e6:.2f}",
            f"{reach.bandwidth:.0%}",
            f"{reach.rate:.0%}",
            f"{reach.unpack:.1f}",
            f"{reach.written:.0f}",
        ]
        for part, by_bits in found.reaches.table.items()
        for bits, reach in sorted(by_bits.items())
    ]
    headings = ["ops", ">bits", ">us a call", ">bandwidth", ">rate", ">unpack", ">per number"]
    print_table(headings, rows, "Kernels, as shares of the roofs of headrace doctor")
    host = found.reaches.host
    print_figures(
        "Engine",
        {
            "start of a step": f"{host.launch * 1e6:.0f} us, and "
            f"{host.launch_per_sequence * 1e6:.1f} us a sequence",
            "schedule of a step": f"{host.schedule * 1e6:.0f} us",
            "tokens of a launch": f"{host.engine * 1e6:.0f} us, and "
            f"{host.engine_per_sequence * 1e6:.1f} us a sequence",
            "request": f"{host.request * 1e6:.0f} us",
            "memory of a process": size(found.process.base),
        },
    )


def _print(calibration: "Calibration") -> None:
    from headrace.measure.table import print_table

    if calibration.drafts:
        print_table(
            ["layers", ">acceptance", ">cost", ">depth", ">tokens/step", ">expected"],
            [_row(draft) for draft in calibration.drafts],
        )
        print()
    batches = [str(speed.batch) for speed in calibration.drafters[0].speeds]
    print_table(
        ["drafter", ">accepted at 1, 2, ...", ">cost", ">depth", ">tokens/step"]
        + [f">{kind} at {batch}" for batch in batches for kind in ("expected", "measured")],
        [_drafter_row(each) for each in calibration.drafters],
    )
    print(
        "\nacceptance: share of accepted draft tokens; accepted: share of steps that accept at "
        "least 1, 2, ... draft tokens; cost: of a draft token, in plain steps; depth: the fastest "
        "for one sequence; expected: speed at the best depth; measured: with adaptive "
        "speculation, in turns with plain decoding; both with so many sequences at once"
    )
    if suggestion := calibration.suggestion:
        speed = suggestion.speeds[0]
        options = ", ".join(f"{name}={value!r}" for name, value in suggestion.options.items())
        print(
            f"{suggestion.drafter.name}, one sequence: {speed.speed:.2f}x "
            f"({min(speed.speedups):.2f}-{max(speed.speedups):.2f})"
        )
        print(f"Suggestion: {options}")
    else:
        print(
            "None of these saves time here: leave the proposer off, or try a smaller model or a "
            "model that was trained to exit early."
        )


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


def _drafter_row(measured: "MeasuredDrafter") -> list[str]:
    shares = measured.acceptance[: max(3, measured.depth)]
    speeds = [f"{speed:.2f}x" for each in measured.speeds for speed in (each.predicted, each.speed)]
    return [
        measured.drafter.name,
        " ".join(f"{share:.2f}" for share in shares),
        f"{measured.cost:.2f}",
        str(measured.depth),
        f"{measured.tokens_per_step:.2f}",
        *speeds,
    ]
