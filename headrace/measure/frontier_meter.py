"""Measures the forms of a frontier, each attached to the full model."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from headrace.convert.quality import Scorer
from headrace.convert.spill_file import SpillFile
from headrace.loader.drafts import model_program
from headrace.measure.draft_meter import DraftMeter
from headrace.measure.frontier_points import EarlyRows, FormScore, FormSpeed
from headrace.measure.frontier_rungs import Form, Workshop
from headrace.program.kv import KvGroup, number_bytes
from headrace.program.op import StepSize

_ROUNDS, _QUICK_ROUNDS = 15, 5
_DRAFTED, _QUICK_DRAFTED = 128, 32
"""Tokens that drafts predict."""


def drafted_tokens(*, is_quick: bool) -> int:
    return _QUICK_DRAFTED if is_quick else _DRAFTED


class FormMeter:
    """Measures quality and speed of forms."""

    def __init__(self, workshop: Workshop) -> None:
        """Let the full model write the text that drafts predict."""
        self._evaluator = workshop.evaluator
        self._rounds = _QUICK_ROUNDS if workshop.is_quick else _ROUNDS
        self._piece = workshop.evaluator.pieces[0]
        self._full = workshop.full
        with self._compiled(self._full) as full:
            drafted = drafted_tokens(is_quick=workshop.is_quick)
            self._drafts = DraftMeter(full, self._piece, drafted)

    def score(self, name: str, form: Form, reference: SpillFile) -> FormScore:
        """Score a form against log-probabilities of the full model."""
        acceptance, early = None, None
        with self._pair(form) as (full, ours, short):
            if short:
                rows = self._drafts.leaves(full, short)
                early = EarlyRows(share=rows, step_bytes=self._step_bytes(short))
            elif full is not ours and _drafts(full, ours):
                acceptance = self._drafts.acceptance(full, ours)
            quality = self._evaluator.quality(name, ours, reference)
            return FormScore(
                weight_bytes=ours.executable.program.weight_bytes,
                step_bytes=self._step_bytes(ours),
                quality=quality,
                acceptance=acceptance,
                early=early,
            )

    def speed(self, form: Form) -> FormSpeed:
        """Time a form, in turns with the full model."""
        with self._pair(form) as (full, ours, short):
            costs = None
            if short:
                costs = self._drafts.costs(ours, short, self._rounds)
            elif full is not ours and _drafts(full, ours):
                costs = self._drafts.costs(full, ours, self._rounds)
            if costs is None:  # the text of the drafts begins with the piece
                full.read(self._piece)
            if not _drafts(full, ours):
                ours.read(self._piece)
            end = len(self._piece)
            step = full.batch(self._piece, end - 1, end)
            turns = [(full.seconds(step), ours.seconds(step)) for _ in range(self._rounds)]
            is_full = ours is full
        of_full, of_ours = (statistics.median(times) for times in zip(*turns, strict=True))
        if is_full:
            of_ours = of_full
        return FormSpeed(seconds=of_ours, full_seconds=of_full, costs=costs)

    @contextmanager
    def _pair(self, form: Form) -> Iterator[tuple[Scorer, Scorer, Scorer | None]]:
        """Compile the full model, a form, and the form's layers before an early exit.

        A model keeps the weights of all programs that were attached to it, so each form gets a new
        one. A form whose KV is the full model's or a part of it is attached. Attention over the
        full model's KV would not have other windows or another number format.
        """
        with self._compiled(self._full, form) as full:
            if form is self._full:
                yield full, full, None
                return
            groups = form.program.kv_groups
            shares_kv = full.kv_dtype == form.config.kv_format
            if not (shares_kv and _fits(groups, full.executable.program.kv_groups)):
                with self._compiled(form) as alone:
                    yield full, alone, None
                return
            checkpoint, early = self._evaluator.checkpoint, form.before_exit
            short = full.attach(*early.over(checkpoint)) if early else None
            yield full, full.attach(*form.over(checkpoint)), short

    @contextmanager
    def _compiled(self, form: Form, other: Form | None = None) -> Iterator[Scorer]:
        """Compile a form, with the bounds of keys that another form may read."""
        program = model_program(form.config, form.checkpoint)
        if other and any(group.has_key_bounds for group in other.program.kv_groups):
            program = program.with_key_bounds()
        scorer = self._evaluator.compile(program, form.checkpoint, form.config)
        try:
            yield scorer
        finally:
            scorer.close()

    def _step_bytes(self, model: Scorer) -> int:
        program = model.executable.program
        kv_bytes = number_bytes(program.kv_groups, model.kv_dtype)
        step = StepSize(((len(self._piece), 1),), 1, kv_bytes)
        return sum(op.bytes(step) for op in program.ops)


def _drafts(full: Scorer, ours: Scorer) -> bool:
    """Whether a form is attached to the full model."""
    groups = ours.executable.program.kv_groups
    return ours.kv_dtype == full.kv_dtype and _fits(groups, full.executable.program.kv_groups)


def _fits(groups: Sequence[KvGroup], full: Sequence[KvGroup]) -> bool:
    """Whether a form's KV is that of some or all layers of the full model."""
    return len(groups) == len(full) and all(
        set(ours.layers) <= set(theirs.layers) and replace(ours, layers=theirs.layers) == theirs
        for ours, theirs in zip(groups, full, strict=True)
    )
