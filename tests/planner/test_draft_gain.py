"""Tokens per step and speed of speculative decoding, against published values, against each other,
and against the engine.
"""

import zlib

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.planner.draft_gain import Costs, best_gain, exit_round, expected_tokens, gain
from headrace.proposer import Pays, SequenceView, always_pays
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.draft_model import DraftModelProposer
from tests.engine.toy import Kept, ToyExecutable, toy_engine, toy_kv
from tests.tiny import run_all


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"),
    [
        (0.7, 4, 2.77),
        (0.8, 4, 3.36),
        (0.9, 4, 4.10),
        (0.7, 8, 3.20),
        (0.8, 8, 4.33),
        (0.9, 8, 6.13),
        (0, 5, 1),
        (1, 5, 6),
        (0.5, 0, 1),
    ],
)
def test_expected_tokens(acceptance: float, depth: int, tokens: float) -> None:
    assert expected_tokens(acceptance, depth) == pytest.approx(tokens, abs=0.005)


def simulated_tokens(acceptance: float, depth: int, steps: int) -> float:
    """Mean tokens of a step whose drafts are right by chance."""
    chances = np.random.default_rng(0).random((steps, depth))
    return 1 + float(np.cumprod(chances < acceptance, axis=1).sum()) / steps


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_expected_tokens_agree_with_a_simulation(acceptance: float, depth: int) -> None:
    assert simulated_tokens(acceptance, depth, 40_000) == pytest.approx(
        expected_tokens(acceptance, depth), rel=0.02
    )


def test_gain() -> None:
    """(1 - a^(K+1)) / ((1 - a)(c K + 1)) if further rows are free (Leviathan et al. 2023)."""
    assert gain(0.8, 5, Costs([1.0] * 6, 0.05)).speedup == pytest.approx(
        (1 - 0.8**6) / (0.2 * 1.25)
    )
    assert gain(0.8, 2, Costs([2.0, 2.5, 3.0], 0.5)).speedup == pytest.approx(2.44 * 2 / 4)
    assert gain(0.0, 1, Costs([1.0, 1.0], 0.0)) == (1, 1.0, 1.0)
    assert best_gain(0.0, Costs([1.0, 2.0, 3.0], 1.0)) == (
        1,
        1.0,
        1 / 3,
    )  # the best depth, even if plain decoding is faster


def test_best_depth_grows_with_acceptance_and_shrinks_with_cost() -> None:
    depths = [
        best_gain(acceptance, Costs([1.0] * 17, 0.1)).depth for acceptance in (0.2, 0.5, 0.8, 0.95)
    ]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] > 8
    assert (
        best_gain(0.8, Costs([1.0] * 17, 0.5)).depth < best_gain(0.8, Costs([1.0] * 17, 0.1)).depth
    )
    assert best_gain(0.8, Costs([1 + 0.5 * rows for rows in range(9)], 0.1)).depth == 1


class OftenRight(ToyExecutable):
    """The toy model, turned upside down after one text in four."""

    def _logits(self, kept: Kept) -> NDArray[np.float32]:
        logits = super()._logits(kept)
        return -logits if zlib.crc32(logits.tobytes()) % 4 == 0 else logits


class Watched(DraftModelProposer):
    """Counts accepted drafts by depth."""

    def __init__(self, depth: int) -> None:
        super().__init__(OftenRight(4), toy_kv(64, 4), 40, depth, 1, probabilities=False)
        self.paths: list[int] = []
        self._full: list[int] = []

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        drafts = super().propose(seqs, budgets, pays)
        self._full = [len(draft.tokens) for draft in drafts]
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        self.paths += [
            len(commit.path) for commit in commits if self._full == [self.traits.max_nodes]
        ]
        self._full = []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [2, 4])
def test_expected_tokens_agree_with_the_engine(depth: int, temperature: float) -> None:
    """Tokens per step as they come, and as they follow from how often a draft was right after right
    ones.
    """
    proposer = Watched(depth)
    engine = toy_engine(proposer=proposer, max_num_seqs=1)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=36) for i in range(60)]
    run_all(engine, [([i % 23, i // 23], p) for i, p in enumerate(params)])
    right = sum(proposer.paths)
    acceptance = right / (right + sum(path < depth for path in proposer.paths))
    measured = 1 + right / len(proposer.paths)
    assert len(proposer.paths) > 300 and 0.6 < acceptance < 0.9
    assert measured == pytest.approx(expected_tokens(acceptance, depth), rel=0.05)
    assert measured == pytest.approx(simulated_tokens(acceptance, depth, 20_000), rel=0.06)


def test_cost_of_an_early_exit_is_the_mean_of_its_rounds() -> None:
    """A token stays: one try and a full step. Both leave: two tries and a step of three rows."""
    costs = Costs([10.0, 11.0, 12.0], 4.0)
    assert exit_round(0.0, costs) == (0, 10.0)
    assert exit_round(0.0, costs, 2).cost == 14.0
    assert exit_round(1.0, costs) == (2, (2 * 4.0 + 12.0) / 3)
    stays, one, both = 0.5 * 14.0, 0.25 * (2 * 4.0 + 11.0), 0.25 * (2 * 4.0 + 12.0)
    tokens = 0.5 * 1 + 0.25 * 2 + 0.25 * 3
    assert exit_round(0.5, costs, 2).cost == pytest.approx((stays + one + both) / tokens)
