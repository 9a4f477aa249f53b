"""Measures a form of a model as an exact draft of the full model, over the full model's KV."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.backend import forward
from headrace.convert.quality import Scorer
from headrace.planner.draft_gain import Costs, Gain, best_gain

_MAX_DEPTH = 8


class DraftSpeed(NamedTuple):
    acceptance: float
    """Share of the full model's greedy tokens that the draft predicts."""
    gain: Gain
    """Of the best depth, by measured times of steps."""


class DraftMeter:
    """A text that the full model goes on with, and that drafts predict."""

    def __init__(self, full: Scorer, given: Sequence[int], tokens: int) -> None:
        """Let `full`, whose context has `spare(tokens)` after the given text, write more."""
        self._given = len(given)
        self._text = list(given)
        full.read(given[:-1])
        for _ in range(tokens):
            self._text.append(_chosen(full, self._text, len(self._text) - 1))

    @staticmethod
    def spare(tokens: int) -> int:
        """Tokens of context that a model needs after the given text."""
        return tokens + _MAX_DEPTH + 1

    def measure(self, full: Scorer, draft: Scorer, rounds: int) -> DraftSpeed:
        """Measure a form that is attached to the full model."""
        full.read(self._text)
        acceptance = self._acceptance(draft)
        full.read(self._text)
        return DraftSpeed(acceptance, best_gain(acceptance, self._costs(full, draft, rounds)))

    def _acceptance(self, draft: Scorer) -> float:
        """Predict each written token from the full model's KV, the last token first.

        A draft writes KV of its own row only, which no earlier row reads.
        """
        rows = range(len(self._text) - 2, self._given - 2, -1)
        return float(np.mean([_chosen(draft, self._text, r) == self._text[r + 1] for r in rows]))

    def _costs(self, full: Scorer, draft: Scorer, rounds: int) -> Costs:
        """Steps of both models take turns, so that a busy machine slows both."""
        depths = range(_MAX_DEPTH + 1)
        text, end = self._text + self._text[-1:] * _MAX_DEPTH, len(self._text)
        steps = [full.batch(text, end - 1, end + depth) for depth in depths]
        target: list[list[float]] = [[] for _ in depths]
        own: list[float] = []
        for _ in range(rounds):
            for depth in depths:
                target[depth].append(full.seconds(steps[depth]))
                own.append(draft.seconds(steps[0]))
        return Costs([statistics.median(times) for times in target], statistics.median(own))


def _chosen(model: Scorer, text: Sequence[int], row: int) -> int:
    """The likeliest token after a row."""
    logits = forward(model.executable, model.batch(text, row, row + 1)).logits
    assert logits is not None, "the batch has a logit row"
    return int(logits[-1].argmax())
