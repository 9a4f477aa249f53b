"""Measures a form of a model as an exact draft of the full model, over the full model's KV."""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from headrace.backend import forward
from headrace.convert.quality import Scorer
from headrace.planner.draft_gain import Costs
from headrace.quant.arrays import Floats

MAX_DEPTH = 8
"""Draft tokens in a row."""


class DraftMeter:
    """A text that the full model goes on with, and that drafts predict."""

    def __init__(self, full: Scorer, given: Sequence[int], tokens: int) -> None:
        """Let `full`, whose context has `spare(tokens)` after the given text, write more."""
        self._given = len(given)
        self._text = list(given)
        full.read(given[:-1])
        for _ in range(tokens):
            self._text.append(int(_logits(full, self._text, len(self._text) - 1).argmax()))

    @staticmethod
    def spare(tokens: int) -> int:
        """Tokens of context that a model needs after the given text."""
        return tokens + MAX_DEPTH + 1

    def acceptance(self, full: Scorer, draft: Scorer) -> float:
        """The share of the full model's greedy tokens that a form, attached to it, predicts."""
        return self._share(
            full, draft, lambda logits, row: int(logits.argmax()) == self._text[row + 1]
        )

    def leaves(self, full: Scorer, early: Scorer) -> float:
        """The share of tokens that leave early; `early`, attached to the full model, ends there.

        It has no logits (NaN) for tokens that stay.
        """
        return self._share(full, early, lambda logits, row: not np.isnan(logits).any())

    def costs(self, full: Scorer, draft: Scorer, rounds: int) -> Costs:
        """Times of steps of two models over one KV.

        They take turns, so that a busy machine slows both.
        """
        full.read(self._text)
        depths = range(MAX_DEPTH + 1)
        text, end = self._text + self._text[-1:] * MAX_DEPTH, len(self._text)
        steps = [full.batch(text, end - 1, end + depth) for depth in depths]
        target: list[list[float]] = [[] for _ in depths]
        own: list[float] = []
        for _ in range(rounds):
            for depth in depths:
                target[depth].append(full.seconds(steps[depth]))
                own.append(draft.seconds(steps[0]))
        return Costs([statistics.median(times) for times in target], statistics.median(own))

    def _share(self, full: Scorer, form: Scorer, holds: Callable[[Floats, int], bool]) -> float:
        """The share of written tokens before which the form's logits have a property.

        The last token comes first: a form writes KV of its own row only, which no earlier row
        reads.
        """
        full.read(self._text)
        rows = range(len(self._text) - 2, self._given - 2, -1)
        return float(np.mean([holds(_logits(form, self._text, row), row) for row in rows]))


def _logits(model: Scorer, text: Sequence[int], row: int) -> Floats:
    """The logits after a row [vocabulary]."""
    logits = forward(model.executable, model.batch(text, row, row + 1)).logits
    assert logits is not None, "the batch has a logit row"
    last: Floats = logits[-1]
    return last
