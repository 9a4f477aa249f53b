"""Train a drafter for a model, or a smaller model, on this machine.

`distil draft MODEL OUT` lets the model answer prompts, and trains a drafter on the answers:
a small layer over the model's rows that drafts tokens for speculative decoding. `distil
student MODEL OUT --layers N` trains a smaller model of the same family, which begins as parts of
the model, and prints an evaluation of both. The prompts are yours (`--prompts`), or the model
writes them. OUT appears when it is complete. A stopped training goes on with the same command.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    add_model,
    add_seed,
    add_threads,
    number,
    whole_number,
    whole_numbers,
)
from headrace.cli.distil_student import STUDENT_OPTIONS, add_student, run_student
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.distil.draft_run import TrainedDraft

EXAMPLES = """\
  headrace distil draft smollm2 smollm2-draft
  headrace distil draft MODEL OUT --prompts chats.jsonl --minutes 60
  headrace run smollm2 --draft-model smollm2-draft
  headrace distil student smollm2 smollm2-half --layers 15 --learn outputs,logits,rows"""

KINDS = ("draft", "student")
_OF_KIND = {"draft": ("drafter", "vocab_size", "taps"), "student": STUDENT_OPTIONS}
"""Options of one kind alone. Their default is None."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=KINDS,
        metavar="KIND",
        help="draft: a drafter over the rows of MODEL; student: a smaller model of the same family",
    )
    add_model(parser, optional=False)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder of the trained model")
    _add_answers(parser)
    _add_drafter(parser)
    add_student(parser)
    _add_training(parser)
    add_threads(parser.add_argument_group("compute"))


def _add_answers(parser: argparse.ArgumentParser) -> None:
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one a line or JSON lines with messages (default: prompts that the model "
        "writes, and questions and tasks from lists)",
    )
    answers.add_argument(
        "--answers",
        type=Path,
        metavar="FOLDER",
        help="folder of recorded answers, which are recorded there if it is new (default: a folder "
        "next to OUT, which is removed at the end)",
    )
    answers.add_argument(
        "--tokens",
        type=whole_number(64, 2**32),
        metavar="N",
        default=300_000,
        help="answer tokens to record",
    )
    answers.add_argument(
        "--temperature",
        type=number(0, 100),
        metavar="T",
        help="temperature of the answers that are trained on; 0: the likeliest tokens, which "
        "held-out answers always have (default: 0.6 for a drafter, 0 for a student)",
    )


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    draft = parser.add_argument_group("drafter")
    draft.add_argument(
        "--drafter",
        choices=("joined", "eagle3"),
        help="joined (the default): one matrix joins embedding and rows, which drafts better after "
        "a short training; eagle3: the layer of EAGLE-3, which other engines load too",
    )
    draft.add_argument(
        "--vocab-size",
        type=whole_number(64, 2**20),
        metavar="N",
        help="number of tokens that it can draft: the most frequent ones of the answers (default: "
        "8192)",
    )
    draft.add_argument(
        "--taps",
        type=whole_numbers(0, 2**12),
        metavar="N,...",
        help="layers of the model before which it reads rows; the number of layers: after the last "
        "(default: 2, the number of layers less 3, and the number of layers)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--minutes",
        type=number(0.1, 1e5),
        metavar="M",
        help="minutes of training after the answers are recorded; the number of steps follows from "
        "the first ones (default: 20 for a drafter, 60 for a student)",
    )
    training.add_argument(
        "--steps",
        type=whole_number(1, 2**30),
        metavar="N",
        help="number of steps, in place of --minutes; the same number gives the same weights",
    )
    training.add_argument(
        "--learning-rate",
        type=number(1e-7, 1),
        metavar="R",
        help="highest learning rate (default: 0.0001 for a joined drafter, 0.001 for eagle3, "
        "0.0005 for a student)",
    )
    add_seed(training, 0, "seed of the answers, the first weights and the order of training")


def run(args: argparse.Namespace) -> int:
    for kind, names in _OF_KIND.items():
        given = [name for name in names if kind != args.kind and getattr(args, name) is not None]
        if given:
            raise RequestError(
                f"--{given[0].replace('_', '-')} is an option of `distil {kind}`; leave it out"
            )
    if args.kind == "student":
        return run_student(args)
    return _run_draft(args)


def _run_draft(args: argparse.Namespace) -> int:
    from headrace.cli.progress import progress_bar
    from headrace.distil.draft_run import VOCAB_SIZE, DraftOptions, train_draft

    options = DraftOptions(
        answers=args.answers,
        prompts=args.prompts,
        num_tokens=args.tokens,
        temperature=DraftOptions.temperature if args.temperature is None else args.temperature,
        kind=args.drafter or DraftOptions.kind,
        taps=args.taps or (),
        vocab_size=args.vocab_size or VOCAB_SIZE,
        steps=args.steps or 0,
        minutes=args.minutes or DraftOptions.minutes,
        learning_rate=args.learning_rate or DraftOptions.learning_rate,
        seed=args.seed,
        threads=args.threads,
    )
    with progress_bar() as on_progress:
        trained = train_draft(args.model, args.out, options, on_progress)
    _print(args, trained)
    return 0


def _print(args: argparse.Namespace, trained: "TrainedDraft") -> None:
    from headrace.measure.table import print_figures

    figures, last = trained.held_out, trained.curve.points[-1]
    shares = [value for name, value in figures.items() if name.startswith("acceptance_")]
    print_figures(
        f"Drafter of {args.model}",
        {
            "trained on": f"{trained.num_tokens:,} tokens, {last.step:,} steps, "
            f"{last.seconds / 60:.1f} minutes",
            "acceptance": " ".join(f"{share:.1%}" for share in shares)
            + " of drafts 1, 2, ... of held-out answers",
            "tokens a step": f"{figures['tokens_per_step']:.2f} with {len(shares)} drafts",
            "curve": str(args.out / "curve.svg"),
        },
    )
    print(f"\nUse it: headrace run {args.model} --draft-model {args.out}")
