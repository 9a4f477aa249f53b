"""Measures a frontier: bytes, speed and loss of all forms of a model, each also as a draft."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from headrace.convert.quality import Quality, Scorer
from headrace.convert.spill_file import SpillFile
from headrace.errors import HeadraceError, RequestError
from headrace.loader.drafts import model_program
from headrace.measure.draft_meter import DraftMeter, DraftSpeed
from headrace.measure.evaluate import MAX_TOKENS, Evaluator
from headrace.measure.frontier import pareto_frontier
from headrace.measure.frontier_rungs import Form, Rung, Workshop, rungs_of
from headrace.measure.options import ModelOptions
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.program.kv import KvGroup, number_bytes
from headrace.program.op import StepSize
from headrace.record import frozen
from headrace.validation import integer

MAX_KL = 0.02
"""KL divergence, in nats, up to which a lossy mode is advised."""
MIN_GAIN = 1.05
"""Speed over the full model from which a mode pays."""
_ROUNDS, _QUICK_ROUNDS = 15, 5
_DRAFTED, _QUICK_DRAFTED = 128, 32
"""Tokens that drafts predict."""


@frozen(kw_only=True)
class Point:
    """A measured form of the model."""

    name: str
    kind: str
    weight_bytes: int
    """Bytes of all weights in memory."""
    step_bytes: int
    """Bytes that a decode step of one sequence reads at the depth of the frontier."""
    decode: float
    """Tokens/s of one sequence at that depth."""
    gain: float
    """Speed over the full model, whose steps took turns with this form's."""
    quality: Quality
    draft: DraftSpeed | None
    """As an exact draft; None for the full model, and for forms with KV of their own."""

    @property
    def loss(self) -> float:
        """KL divergence from the full model, in nats."""
        return self.quality.kl or 0.0


@frozen(kw_only=True)
class Frontier:
    model: str
    depth: int
    """Tokens of context at which bytes and speeds are measured."""
    tokens: int
    points: tuple[Point, ...]
    """The full model first."""
    left_out: Mapping[str, str]
    """Reasons, by name of the form."""

    @property
    def best(self) -> list[str]:
        """Names of the forms that no other beats in speed and loss."""
        return pareto_frontier(self.points)

    @property
    def advice(self) -> str:
        """A sentence: the lossy form and the draft that pay, or that none does."""
        forms = self.points[1:]
        close = [form for form in forms if form.loss <= MAX_KL and form.gain >= MIN_GAIN]
        drafts = [form for form in forms if form.draft and form.draft.gain.speedup >= MIN_GAIN]
        lossy = max(close, key=lambda form: form.gain, default=None)
        exact = max(
            drafts, key=lambda form: form.draft.gain.speedup if form.draft else 0.0, default=None
        )
        parts = []
        if lossy:
            parts.append(
                f"{lossy.name} decodes {lossy.gain:.2f} times as fast for a KL of {lossy.loss:.4f} "
                "nats"
            )
        if exact and exact.draft:
            parts.append(
                f"{exact.name} as an exact draft gives {exact.draft.gain.speedup:.2f} times the "
                f"speed ({exact.draft.gain.depth} tokens deep) and changes no token"
            )
        if not parts:
            return f"No form pays here: {self._nearest()}."
        return f"{'; '.join(parts)}."

    def _nearest(self) -> str:
        """The best draft and the fastest close form, which are too slow."""
        forms = self.points[1:]
        if not forms:
            return "none could be made"
        near = max(forms, key=lambda form: form.draft.gain.speedup if form.draft else 0.0)
        fastest = max(forms, key=lambda form: form.gain)
        text = f"{fastest.name}, the fastest, has a KL of {fastest.loss:.3f} nats"
        if near.draft:
            text += (
                f", and {near.name}, the best draft, gives {near.draft.gain.speedup:.2f} times the "
                f"speed with {near.draft.acceptance:.0%} of its tokens accepted"
            )
        return text

    def facts(self) -> dict[str, Any]:
        """The frontier as JSON, in bytes, tokens/s and nats."""
        return {
            "model": self.model,
            "depth": self.depth,
            "tokens": self.tokens,
            "rows": [_facts(point) for point in self.points],
            "frontier": self.best,
            "left_out": dict(self.left_out),
            "advice": self.advice,
        }


def _facts(point: Point) -> dict[str, Any]:
    draft = point.draft and {
        "acceptance": point.draft.acceptance,
        **point.draft.gain._asdict(),
    }
    return vars(point) | {"quality": vars(point.quality), "draft": draft}


def measure_frontier(
    model: str,
    *,
    formats: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    text: Path | str | None = None,
    tokens: int = 4096,
    depth: int = 1024,
    quick: bool = False,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[ModelOptions],
) -> Frontier:
    """Measure all forms of a model: number formats and modes, each also as an exact draft.

    Args:
        formats: in place of the usual formats with fewer bits than the model's.
        files: further forms of the model by name, such as results of `headrace convert`. The name
            of a usual form, such as `2:4 int4-g32`, saves its conversion.
        text: path of a text; by default a part of Python's language reference.
        tokens: number of evaluated tokens.
        depth: tokens of a piece of the text, and of context before the timed tokens.
        quick: fewer forms, and fewer steps of each.
        options: fields of `EngineConfig`.

    Forms that the model cannot have are left out by name. Raises RequestError for an unknown
    format, a lossy option, or a model without a head.
    """
    integer("depth", depth, 2, MAX_TOKENS)
    integer("tokens", tokens, 2, MAX_TOKENS)
    drafted = _QUICK_DRAFTED if quick else _DRAFTED
    spare = DraftMeter.spare(drafted)
    evaluator = Evaluator(model, options, text, tokens, depth, on_progress, spare)
    if evaluator.mode.lossy:
        raise RequestError(
            f"a frontier measures all modes; leave out this one: {evaluator.mode.lossy}"
        )

    with SpillFile() as reference, tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        evaluator.score_reference(None, reference)
        workshop = Workshop(
            evaluator=evaluator,
            folder=Path(folder),
            formats=formats,
            files=files or {},
            is_quick=quick,
        )
        meter = _FormMeter(workshop, reference, drafted)
        points, left_out = [meter.full(model)], dict[str, str]()
        rungs = rungs_of(workshop)
        for number, rung in enumerate(rungs):
            on_progress(f"form {number + 1} of {len(rungs)}: {rung.name}", 0.0)
            try:
                points.append(meter.measure(rung))
            except HeadraceError as error:
                left_out[rung.name] = str(error)
    return Frontier(
        model=model,
        depth=len(evaluator.pieces[0]),
        tokens=points[0].quality.tokens,
        points=tuple(points),
        left_out=left_out,
    )


def _fits(groups: Sequence[KvGroup], full: Sequence[KvGroup]) -> bool:
    """Whether a form's KV is that of some or all layers of the full model."""
    return len(groups) == len(full) and all(
        set(ours.layers) <= set(theirs.layers) and replace(ours, layers=theirs.layers) == theirs
        for ours, theirs in zip(groups, full, strict=True)
    )


class _FormMeter:
    """Measures forms, each attached to the full model."""

    def __init__(self, workshop: Workshop, reference: SpillFile, drafted: int) -> None:
        self._evaluator, self._reference, self._drafted = workshop.evaluator, reference, drafted
        self._rounds = _QUICK_ROUNDS if workshop.is_quick else _ROUNDS
        self._piece = workshop.evaluator.pieces[0]

    def full(self, model: str) -> Point:
        """Measure the full model, which also writes the text that drafts predict."""
        full = self._evaluator.scorer(self._evaluator.tensors)
        try:
            quality = self._evaluator.quality(model, full, self._reference)
            self._drafts = DraftMeter(full, self._piece, self._drafted)
            seconds, _ = self._speed(full, full)
            return self._point(model, "full", full, quality, (seconds, 1.0), None)
        finally:
            full.close()

    def measure(self, rung: Rung) -> Point:
        form = rung.make()
        # A model keeps the weights of all programs that were attached to it, so each form gets a
        # new one.
        full = self._full_for(form)
        alone: Scorer | None = None
        try:
            if _fits(form.program.kv_groups, full.executable.program.kv_groups):
                ours = full.attach(*form.over(self._evaluator.checkpoint))
                draft = self._drafts.measure(full, ours, self._rounds)
            else:
                # Attention over the full model's KV would not have the form's windows.
                full.read(self._piece)
                alone = ours = self._evaluator.compile(
                    form.program, form.checkpoint.tensors, form.config
                )
                draft = None
            quality = self._evaluator.quality(rung.name, ours, self._reference)
            return self._point(rung.name, rung.kind, ours, quality, self._speed(full, ours), draft)
        finally:
            if alone:
                alone.close()
            full.close()

    def _full_for(self, form: Form) -> Scorer:
        """Compile the full model, with the bounds of keys that the form may read."""
        evaluator = self._evaluator
        program = model_program(evaluator.config, evaluator.checkpoint)
        if any(group.has_key_bounds for group in form.program.kv_groups):
            program = program.with_key_bounds()
        return evaluator.compile(program, evaluator.tensors, evaluator.config)

    def _speed(self, full: Scorer, ours: Scorer) -> tuple[float, float]:
        """Median seconds of a decode step, and the full model's over them; steps take turns."""
        ours.read(self._piece)
        end = len(self._piece)
        step = full.batch(self._piece, end - 1, end)
        turns = [(full.seconds(step), ours.seconds(step)) for _ in range(self._rounds)]
        of_full, of_ours = (statistics.median(times) for times in zip(*turns, strict=True))
        return of_ours, of_full / of_ours

    def _point(
        self,
        name: str,
        kind: str,
        model: Scorer,
        quality: Quality,
        speed: tuple[float, float],
        draft: DraftSpeed | None,
    ) -> Point:
        program = model.executable.program
        kv_bytes = number_bytes(program.kv_groups, self._evaluator.config.kv_format)
        step = StepSize(((len(self._piece), 1),), 1, kv_bytes)
        seconds, gain = speed
        return Point(
            name=name,
            kind=kind,
            weight_bytes=program.weight_bytes,
            step_bytes=sum(op.bytes(step) for op in program.ops),
            decode=1 / seconds,
            gain=gain,
            quality=quality,
            draft=draft,
        )
