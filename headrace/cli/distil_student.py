"""The part of `headrace distil` that trains a smaller model."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import number, whole_number, whole_numbers
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.distil.student_eval import Score
    from headrace.distil.student_run import TrainedStudent

STUDENT_OPTIONS = (
    "layers",
    "width",
    "ffn_width",
    "learn",
    "logit_temperature",
    "top_k",
    "rationales",
    "compare",
)
_MAX_WIDTH = 1 << 20


def add_student(parser: argparse.ArgumentParser) -> None:
    """Add the options of a student, whose default is None."""
    shape = parser.add_argument_group("student", "Its parts are chosen from the model.")
    shape.add_argument(
        "--layers",
        type=whole_numbers(0, 2**12),
        metavar="N",
        help="number of layers, for which the layers are chosen whose loss is smallest before the "
        "training; or the numbers of the layers, such as 0,1,4,5 (default: all)",
    )
    shape.add_argument(
        "--width",
        type=whole_number(1, _MAX_WIDTH),
        metavar="W",
        help="width of the rows, a multiple of 32; heads and MLPs shrink in the same ratio "
        "(default: the width of the model)",
    )
    shape.add_argument(
        "--ffn-width",
        type=whole_number(1, _MAX_WIDTH),
        metavar="F",
        help="width of the MLPs, a multiple of 32 (default: in the ratio of the widths)",
    )
    signals = parser.add_argument_group("signals of the model for a student")
    signals.add_argument(
        "--learn",
        metavar="SIGNAL,...",
        help="what the student learns from: outputs (the text of the answers), logits (the "
        "distribution of each token), rows (between layers, and before the head) (default: "
        "outputs,logits)",
    )
    signals.add_argument(
        "--logit-temperature",
        type=number(0.01, 100),
        metavar="T",
        help="temperature at which distributions are compared (default: 1)",
    )
    signals.add_argument(
        "--top-k",
        type=whole_number(0, _MAX_WIDTH),
        metavar="K",
        help="number of the likeliest tokens whose probabilities are compared; 0: all (default: 0)",
    )
    signals.add_argument(
        "--rationales",
        action="store_true",
        default=None,
        help="whether the model is asked to reason before it answers; the student learns to reason "
        "without being asked",
    )
    signals.add_argument(
        "--compare",
        action="store_true",
        default=None,
        help="whether to train a second student for as many steps on the text alone, and to "
        "evaluate it too; this doubles the time",
    )


def run_student(args: argparse.Namespace) -> int:
    """Train a student, and print the evaluation. Raises RequestError."""
    from headrace.cli.progress import progress_bar
    from headrace.distil.student_run import StudentOptions, train_student

    if args.layers is None and args.width is None and args.ffn_width is None:
        raise RequestError("a student is smaller than its model; add --layers N or --width W")
    learn = StudentOptions.learn
    if args.learn is not None:
        learn = tuple(name.strip() for name in args.learn.split(",") if name.strip())
    layers = args.layers if args.layers is None or len(args.layers) > 1 else args.layers[0]
    options = StudentOptions(
        layers=layers,
        width=args.width or 0,
        ffn_width=args.ffn_width or 0,
        learn=learn,
        logit_temperature=args.logit_temperature or StudentOptions.logit_temperature,
        top_k=args.top_k or 0,
        rationales=bool(args.rationales),
        compare=bool(args.compare),
        answers=args.answers,
        prompts=args.prompts,
        num_tokens=args.tokens,
        temperature=args.temperature or 0.0,
        steps=args.steps or 0,
        minutes=args.minutes or StudentOptions.minutes,
        learning_rate=args.learning_rate or StudentOptions.learning_rate,
        seed=args.seed,
        threads=args.threads,
    )
    with progress_bar() as on_progress:
        trained = train_student(args.model, args.out, options, on_progress)
    _print(args, trained)
    return 0


def _print(args: argparse.Namespace, trained: "TrainedStudent") -> None:
    from headrace.measure.table import print_table

    last = trained.curve.points[-1]
    headings = ["", ">MB", ">NLL of answers", ">same top", ">NLL of text", ">decode, tokens/s"]
    title = (
        f"{last.step:,} steps, {last.seconds / 60:.1f} minutes; held-out answers of {args.model}"
    )
    print_table(headings, [_cells(each) for each in trained.scores], title)
    print(f"\ncurve: {args.out / 'curve.svg'}")
    print(f"Use it: headrace run {args.out}")
    print(f"As a draft model: headrace run {args.model} --draft-model {args.out}")


def _cells(score: "Score") -> list[str]:
    return [
        score.name,
        f"{score.weight_bytes / 1e6:,.0f}",
        f"{score.answers_nll:.3f}",
        f"{score.same_top:.1%}",
        f"{score.text_nll:.3f}",
        f"{score.decode:,.0f}",
    ]
