"""Trains a drafter from a model's name to a folder that `draft_model` loads."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.convert.destination import check_destination
from headrace.distil.answers import AnswerSet, open_answers, read_meta
from headrace.distil.curve import Curve
from headrace.distil.curve_picture import curve_svg
from headrace.distil.files import disk_errors
from headrace.distil.record import record_answers
from headrace.distil.teacher import Recording
from headrace.errors import HeadraceError, RequestError
from headrace.measure.progress import ProgressCallback
from headrace.planner.host import usable_cores
from headrace.record import frozen
from headrace.validation import integer, number

if TYPE_CHECKING:
    from headrace.distil.draft import DraftStudent

VOCAB_SIZE = 8192
LEARNING_RATES = {"joined": 1e-4, "eagle3": 1e-3}
"""The first weights of a joined layer draft well already, and large steps lose that."""
_MAX_TOKENS = 192
"""Maximum tokens of an answer: more different answers in place of the ends of long ones."""


@frozen(kw_only=True)
class DraftOptions:
    """What to train, and for how long."""

    answers: Path | None = None
    """Folder of recorded answers; None: recorded next to the output, and removed at the end."""
    prompts: Path | None = None
    """File of prompts; None: the model writes them."""
    num_tokens: int = 300_000
    """Answer tokens to record."""
    temperature: float = 0.6
    """Temperature of the answers that are trained on; those that are held out are greedy."""
    taps: tuple[int, ...] = ()
    """Layers before which rows are taken; empty: `default_taps`."""
    kind: Literal["joined", "eagle3"] = "joined"
    """joined or eagle3 (`distil/draft.py`)."""
    vocab_size: int = VOCAB_SIZE
    """Number of tokens that the drafter can draft."""
    steps: int = 0
    """Training steps; 0: as many as fit into `minutes`."""
    minutes: float = 20.0
    """Minutes of training, after the answers are recorded."""
    learning_rate: float = 0.0
    """Highest learning rate; 0: `LEARNING_RATES`."""
    seed: int = 0
    save_seconds: float = 60.0
    """Seconds between two states on disk."""
    threads: int = 0
    """Compute threads; 0: one for each usable core."""

    def __post_init__(self) -> None:
        integer("vocab_size", self.vocab_size, 64, 1 << 20)
        integer("steps", self.steps, 0, 1 << 30)
        number("minutes", self.minutes, 0.1, 1e5)
        number("learning_rate", self.learning_rate, 0.0, 1.0)


@frozen(eq=False)
class TrainedDraft:
    """A drafter that was written."""

    curve: Curve
    held_out: Mapping[str, float]
    """Figures over answers that were not trained on."""
    num_tokens: int
    """Tokens of all recorded answers, with their prompts."""


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The rows before layers 2 and n - 3, and those after the last layer, n."""
    return tuple(sorted({min(2, num_layers - 1), max(0, num_layers - 3), num_layers}))


def train_draft(
    model: str, out: Path, options: DraftOptions, on_progress: ProgressCallback
) -> TrainedDraft:
    """Record answers, train a drafter on them, and write it to the new folder `out`.

    Unfinished work is in the folder `OUT.training`, and the same call goes on with it: the result
    equals that of an uninterrupted run. Raises RequestError if that folder has another training,
    or the answers are another model's; ModelError as `open_checkpoint`; HeadraceError if the loss
    is not finite or the disk is full.
    """
    check_destination(out)
    _check_torch()
    target = open_checkpoint(resolve(model))
    work = out.with_name(f"{out.name}.training")
    with disk_errors(work):
        work.mkdir(exist_ok=True)
    answers = _answers(model, target, work, options, on_progress)

    import torch

    from headrace.distil.draft import DraftStudent
    from headrace.distil.draft_files import write_drafter
    from headrace.distil.loop import TrainingOptions, train

    torch.set_num_threads(options.threads or usable_cores())
    special = target.load_tokenizer().special_ids
    student = DraftStudent(
        target,
        answers,
        special,
        vocab_size=options.vocab_size,
        kind=options.kind,
        seed=options.seed,
    )
    identity = {
        "model": answers.meta.fingerprint,
        "answers": _digest(answers),
        "kind": options.kind,
        "vocab_size": options.vocab_size,
        "steps": options.steps,
        "seed": options.seed,
        "type of products": str(student.dtype),
    }
    training = TrainingOptions(
        steps=options.steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate or LEARNING_RATES[options.kind],
        rate_shares=student.rate_shares,
        save_seconds=options.save_seconds,
    )
    curve = train(
        student, work / "state.safetensors", training, identity, on_progress, student.start
    )
    files = _curve_files(model, curve, student)
    write_drafter(out, student.spec, student.module, student.tokens, files)
    shutil.rmtree(work, ignore_errors=True)
    held_out = curve.evaluated[-1].held_out
    return TrainedDraft(curve, held_out, answers.meta.num_tokens)


def _curve_files(model: str, curve: Curve, student: "DraftStudent") -> dict[str, str]:
    """The texts of the curve's files, by name."""
    labels = {"tokens_per_step": "tokens a step"}
    figures = curve.evaluated[-1].held_out
    picture = curve_svg(f"Drafter of {model}", student.summary(figures), curve, labels)
    return {"curve.json": json.dumps(curve.facts(), indent=2) + "\n", "curve.svg": picture}


def _answers(
    model: str, target: Checkpoint, work: Path, options: DraftOptions, on_progress: ProgressCallback
) -> AnswerSet:
    """Open finished answers of the model, or record them. Raises as `train_draft`."""
    folder = options.answers or work / "answers"
    found = read_meta(folder) if options.answers else None
    if not found or not found.finished:
        recording = Recording(
            taps=options.taps or default_taps(target.spec.num_layers),
            num_tokens=options.num_tokens,
            max_tokens=_MAX_TOKENS,
            temperature=options.temperature,
            seed=options.seed,
        )
        threads = options.threads
        return record_answers(
            model, options.prompts, folder, recording, threads=threads, on_progress=on_progress
        )
    if found.fingerprint != fingerprint(target, target.load_tokenizer()):
        raise RequestError(
            f"answers '{folder}' were recorded from another model than {model}; name a new folder"
        )
    if found.rationales:
        raise RequestError(
            f"answers '{folder}' have rationales, whose prompts have no rows for a drafter; name a "
            "new folder"
        )
    if options.taps and options.taps != found.taps:
        raise RequestError(
            f"answers '{folder}' have the rows of taps {_listed(found.taps)}, and --taps is "
            f"{_listed(options.taps)}; leave --taps out, or name a new folder"
        )
    return open_answers(folder)


def _digest(answers: AnswerSet) -> str:
    """Name a recording."""
    facts = json.dumps(asdict(answers.meta))
    return blake2b(facts.encode(), digest_size=8).hexdigest()


def _listed(taps: tuple[int, ...]) -> str:
    return ",".join(map(str, taps))


def _check_torch() -> None:
    if find_spec("torch") is None:
        raise HeadraceError("training needs the package torch; pip install 'headrace[train]'")
