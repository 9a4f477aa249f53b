"""Trains a smaller model, from the name of a large one to a folder in Hugging Face layout."""

import json
import math
import shutil
from dataclasses import asdict, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.convert.destination import atomic_output, check_destination, check_disk_space
from headrace.distil.answers import AnswerSet, open_answers, read_meta
from headrace.distil.curve import Curve
from headrace.distil.curve_picture import curve_svg
from headrace.distil.files import disk_errors
from headrace.distil.record import record_answers
from headrace.distil.student_eval import Score, largest_difference, score
from headrace.distil.student_layers import best_layers
from headrace.distil.student_shape import (
    Shape,
    default_taps,
    student_config,
    student_shape,
    student_spec,
)
from headrace.distil.teacher import Recording
from headrace.errors import HeadraceError, RequestError, UnsupportedModelError
from headrace.measure.progress import ProgressCallback
from headrace.model import tensor_shapes
from headrace.planner.host import usable_cores
from headrace.record import frozen
from headrace.validation import check_names, integer, number

if TYPE_CHECKING:
    from headrace.distil.student import Student

SIGNALS = ("outputs", "logits", "rows")
_MAX_ANSWER = 400
_CHECKED_TOKENS = 32
_MAX_DIFFERENCE = 0.25
"""Largest difference of log-probabilities between transformers and this engine, in nats."""
_SAVE_SECONDS = 300.0
_WEIGHT_BYTES = 30
"""Bytes on the disk for each weight: a state and its successor in f32, with two moments of the
optimiser, and three folders in bf16.
"""
_COMPARED_BYTES = 14
"""Bytes for each weight of a second student: its state, and a folder."""
_LABELS = {"nll": "NLL", "kl": "KL from the teacher", "same_top": "same top"}


@frozen(kw_only=True)
class StudentOptions:
    """The shape of a student, the signals that it learns from, and the length of its training."""

    layers: tuple[int, ...] | int | None = None
    """Layers of the teacher that it keeps, or their number (`best_layers`); None: all."""
    width: int = 0
    """Width of its residual stream; 0: that of the teacher."""
    ffn_width: int = 0
    """Width of its MLPs; 0: in the ratio of the widths."""
    learn: tuple[str, ...] = ("outputs", "logits")
    """Signals of the teacher: its text, its distributions, its rows between layers."""
    logit_temperature: float = 1.0
    """Temperature at which the distributions are compared."""
    top_k: int = 0
    """Number of the teacher's likeliest tokens that are compared; 0: all."""
    rationales: bool = False
    """Whether the teacher reasons before it answers, which the student learns without request."""
    compare: bool = False
    """Whether to train another student without the teacher's distributions and rows, to compare."""
    answers: Path | None = None
    """Folder of recorded answers; None: recorded next to the output, and removed at the end."""
    prompts: Path | None = None
    """File of prompts; None: the model writes them."""
    num_tokens: int = 300_000
    """Answer tokens to record."""
    temperature: float = 0.0
    """Temperature of the answers."""
    steps: int = 0
    """Training steps; 0: as many as fit into `minutes`."""
    minutes: float = 60.0
    """Minutes of training, after the answers are recorded."""
    learning_rate: float = 5e-4
    seed: int = 0
    threads: int = 0
    """Compute threads; 0: one for each usable core."""

    def __post_init__(self) -> None:
        check_names("signal in learn", self.learn, SIGNALS)
        if not self.learn:
            raise RequestError(f"learn is empty; choose signals from {', '.join(SIGNALS)}")
        number("logit_temperature", self.logit_temperature, 0.01, 100.0)
        integer("top_k", self.top_k, 0, 1 << 20)
        integer("steps", self.steps, 0, 1 << 30)
        number("minutes", self.minutes, 0.1, 1e5)
        number("learning_rate", self.learning_rate, 1e-7, 1.0)


@frozen(eq=False)
class TrainedStudent:
    """A student that was written."""

    curve: Curve
    scores: list[Score]
    """Teacher, student before its training, student, and perhaps the student without logits."""


def train_student(
    model: str, out: Path, options: StudentOptions, on_progress: ProgressCallback
) -> TrainedStudent:
    """Record answers, train a smaller model on them, and write it to the new folder `out`.

    Unfinished work is in the folder `OUT.training`, and the same call goes on with it: the result
    equals that of an uninterrupted run. Raises RequestError for a shape that does not fit, or if
    that folder has another training; UnsupportedModelError if transformers has no such family;
    ModelError as `open_checkpoint`; HeadraceError if the loss is not finite or the disk is full.
    """
    check_destination(out)
    _check_packages()
    teacher = open_checkpoint(resolve(model))
    layers = teacher.spec.num_layers if options.layers is None else options.layers
    shape = student_shape(teacher.spec, layers, options.width, options.ffn_width)
    student_config(teacher, shape)
    if isinstance(layers, int) and layers < teacher.spec.num_layers:
        threads = options.threads or usable_cores()
        layers = best_layers(teacher, layers, threads, on_progress)
        shape = student_shape(teacher.spec, layers, options.width, options.ffn_width)
    num_weights = sum(map(math.prod, tensor_shapes(student_spec(teacher.spec, shape)).values()))
    check_disk_space(out, num_weights * (_WEIGHT_BYTES + options.compare * _COMPARED_BYTES))
    work = out.with_name(f"{out.name}.training")
    with disk_errors(work):
        work.mkdir(exist_ok=True)
    answers = _answers(model, teacher, shape, work, options, on_progress)
    run = _Run(model, teacher, shape, answers, work, options, on_progress)
    curve, scores = run.train()
    trained = TrainedStudent(curve, scores)
    with atomic_output(out) as folder:
        shutil.copytree(work / "after", folder)
        _write_figures(folder, out.name, trained)
    shutil.rmtree(work, ignore_errors=True)
    return trained


def _write_figures(folder: Path, name: str, trained: TrainedStudent) -> None:
    last = trained.curve.evaluated[-1].held_out
    subtitle = f"held-out NLL {last['nll']:.3f}, same top {last['same_top']:.1%}"
    picture = curve_svg(f"Student {name}", subtitle, trained.curve, _LABELS)
    facts = {"curve": trained.curve.facts(), "scores": [asdict(each) for each in trained.scores]}
    (folder / "curve.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "curve.svg").write_text(picture, encoding="utf-8")


def _answers(
    model: str,
    teacher: Checkpoint,
    shape: Shape,
    work: Path,
    options: StudentOptions,
    on_progress: ProgressCallback,
) -> AnswerSet:
    """Open finished answers of the model, or record them. Raises as `train_student`."""
    folder = options.answers or work / "answers"
    found = read_meta(folder) if options.answers else None
    if not found or not found.finished:
        recording = Recording(
            taps=default_taps(shape, teacher.spec.num_layers),
            num_tokens=options.num_tokens,
            max_tokens=_MAX_ANSWER,
            temperature=options.temperature,
            seed=options.seed,
            rationales=options.rationales,
        )
        threads = options.threads
        return record_answers(
            model, options.prompts, folder, recording, threads=threads, on_progress=on_progress
        )
    if found.fingerprint != fingerprint(teacher, teacher.load_tokenizer()):
        raise RequestError(
            f"answers '{folder}' were recorded from another model than {model}; name a new folder"
        )
    if found.rationales != options.rationales:
        have, flag = ("have", "give") if found.rationales else ("have no", "leave out")
        raise RequestError(
            f"answers '{folder}' {have} rationales; {flag} --rationales, or name a new folder"
        )
    return open_answers(folder)


class _Run:
    """The training of a student in the folder `work`, and perhaps of one to compare with."""

    def __init__(
        self,
        model: str,
        teacher: Checkpoint,
        shape: Shape,
        answers: AnswerSet,
        work: Path,
        options: StudentOptions,
        on_progress: ProgressCallback,
    ) -> None:
        import torch

        self._model = model
        self._teacher = teacher
        self._shape = shape
        self._answers = answers
        self._work = work
        self._options = options
        self._on_progress = on_progress
        self._threads = options.threads or usable_cores()
        torch.set_num_threads(self._threads)

    def train(self) -> tuple[Curve, list[Score]]:
        """Train, write the students' folders, and evaluate all models."""
        student = self._student(self._options.learn)
        if not (self._work / "state.safetensors").exists():
            self._save(student, "before")
            self._check_twin(student)
        curve = self._train(student, self._options, "state")
        self._save(student, "after")
        del student

        rows = [(self._model, self._model), ("student before", "before"), ("student", "after")]
        if self._options.compare and self._options.learn != ("outputs",):
            alone = replace(self._options, learn=("outputs",), steps=curve.points[-1].step)
            other = self._student(alone.learn)
            self._train(other, alone, "state-outputs")
            self._save(other, "outputs")
            del other
            rows.append(("student, from the text alone", "outputs"))
        return curve, [self._score(*row) for row in rows]

    def _student(self, learn: tuple[str, ...]) -> "Student":
        from headrace.distil.student import Student
        from headrace.distil.student_loss import HeadLoss

        parts = HeadLoss(
            outputs=float("outputs" in learn),
            logits=float("logits" in learn),
            temperature=self._options.logit_temperature,
            top_k=self._options.top_k,
        )
        return Student(
            self._teacher,
            self._answers,
            self._shape,
            parts,
            learns_rows="rows" in learn,
            seed=self._options.seed,
        )

    def _train(self, student: "Student", options: StudentOptions, name: str) -> Curve:
        from headrace.distil.loop import TrainingOptions, train

        training = TrainingOptions(
            steps=options.steps,
            minutes=options.minutes,
            learning_rate=options.learning_rate,
            save_seconds=_SAVE_SECONDS,
        )
        identity = {
            "model": self._answers.meta.fingerprint,
            "answers": _digest(self._answers),
            "layers": list(self._shape.layers),
            "width": self._shape.dim,
            "ffn_width": self._shape.ffn_dim,
            "learn": list(options.learn),
            "logit_temperature": options.logit_temperature,
            "top_k": options.top_k,
            "steps": options.steps,
            "seed": options.seed,
            "type of products": str(student.dtype),
        }
        path = self._work / f"{name}.safetensors"
        return train(student, path, training, identity, self._on_progress)

    def _save(self, student: "Student", name: str) -> None:
        """Write a student; the folder of an earlier run is replaced."""
        shutil.rmtree(self._work / name, ignore_errors=True)
        with atomic_output(self._work / name) as folder:
            student.save(folder, self._teacher)

    def _check_twin(self, student: "Student") -> None:
        """Raise UnsupportedModelError if transformers computes another model than the engine."""
        tokens = self._answers.tokens(0)[:_CHECKED_TOKENS].tolist()
        expected = student.log_probabilities(tokens)
        path = self._work / "before"
        difference = largest_difference(path, tokens, expected, self._threads)
        if not difference < _MAX_DIFFERENCE:
            raise UnsupportedModelError(
                f"transformers computes another model than this engine: log-probabilities differ "
                f"by {difference:.2f}; choose another teacher"
            )

    def _score(self, label: str, name: str) -> Score:
        path = self._model if name == self._model else str(self._work / name)
        return score(label, path, self._answers, self._threads, self._on_progress)


def _digest(answers: AnswerSet) -> str:
    """Name a recording."""
    facts = json.dumps(asdict(answers.meta))
    return blake2b(facts.encode(), digest_size=8).hexdigest()


def _check_packages() -> None:
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise HeadraceError(f"training needs the package {name}; pip install 'headrace[train]'")
