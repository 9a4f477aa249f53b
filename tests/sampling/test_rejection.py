"""The lossless acceptance methods against the exact distribution of a step's tokens.

The vocabulary has five tokens. A step with one draft x ~ q gives one token, or two if the draft is
accepted. Under rejection sampling a single token y has the probability max(p(y) - q(y), 0), and a
pair (x, b) has min(p(x), q(x)) p2(b | x). Under exact verification with an independent draft these
probabilities are p(y) (1 - q(y)) and p(x) q(x) p2(b | x). In both cases the first token has the
distribution p.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import NO_DRAFT, DraftTree
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling import rejection
from headrace.sampling.exact import verify_exact
from headrace.sampling.rejection import pick, residual, verify_rejection
from headrace.sampling.sampler import Sampler
from headrace.sampling.verification import Verifier

VOCAB = 5
DRAWS = 200_000
FEWER = 40_000
"""Number of samples that reveals a wrong distribution."""
POOL = _native.Pool(2)
Floats = NDArray[np.float64]
Tally = Counter[tuple[int, ...]]

TARGET = np.array([1.2, 0.3, -0.5, 0.8, -1.0], np.float32)
DRAFT = np.array([0.1, 1.1, 0.2, 0.9, -2.0], np.float32)
AFTER = (
    np.random.default_rng(0).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
)  # the target's logits after each token


def softmax(logits: NDArray[np.float32]) -> Floats:
    weights = np.exp(logits.astype(np.float64))
    result: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return result


P, Q, P2 = softmax(TARGET), softmax(DRAFT), softmax(AFTER)


def tally(accept: Verifier, draft_seed: int, num_draws: int = DRAWS) -> Tally:
    """Count the tokens of many steps.

    With seed 1, the target's seed, the draft samples with the target's noise, as in the engine.
    """
    counts: Tally = Counter()
    target, draft = Sampler(VOCAB, [], seed=1), Sampler(VOCAB, [], seed=draft_seed)
    size = 2000  # steps at once, each at its own positions
    rows = np.tile(DRAFT, (size, 1))
    for first in range(0, 2 * num_draws, 2 * size):
        positions = range(first, first + 2 * size, 2)
        drafts = first_drawn(
            rows, [SampleOp(i, p, draft.clone(0)) for i, p in enumerate(positions)]
        )
        logits = np.stack([np.tile(TARGET, (size, 1)), AFTER[drafts]], axis=1).reshape(
            2 * size, VOCAB
        )
        draws = [
            SampleOp(2 * i, p, target.clone(0), DraftTree([x], [-1], probabilities=Q[None]))
            for i, (x, p) in enumerate(zip(drafts, positions, strict=True))
        ]
        counts.update(tuple(drawn.tokens) for drawn in finite(accept(draws, logits, POOL)))
    return counts


def finite(results: list[SampleResult | None]) -> list[SampleResult]:
    assert None not in results
    return [result for result in results if result]


def first_drawn(logits: NDArray[np.float32], draws: list[SampleOp]) -> list[int]:
    return [drawn.tokens[0] for drawn in finite(verify_exact(draws, logits, POOL))]


def exact(single: Floats, pair: Floats) -> dict[tuple[int, ...], float]:
    """The distribution of a step's tokens.

    It follows from the distribution of a single token [vocab] and of an accepted draft token
    [vocab].
    """
    pairs = {(x, b): float(pair[x] * P2[x, b]) for x in range(VOCAB) for b in range(VOCAB)}
    return {(y,): float(single[y]) for y in range(VOCAB)} | pairs


REJECTION = exact(np.maximum(P - Q, 0), np.minimum(P, Q))
INDEPENDENT = exact(P * (1 - Q), P * Q)


def is_drawn_from(counts: Tally, expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square test, with the limit of Wilson and Hilferty at four standard deviations.

    It fails by chance in 1 of 30,000 cases.
    """
    assert abs(sum(expected.values()) - 1) < 1e-12
    draws = sum(counts.values())
    possible = {outcome: draws * p for outcome, p in expected.items() if p > 0}
    if counts.keys() - possible.keys():
        return False
    statistic = sum((counts[outcome] - mean) ** 2 / mean for outcome, mean in possible.items())
    freedom = len(possible) - 1
    variance = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - variance + 4 * variance**0.5) ** 3)


def first_tokens(counts: Tally) -> Tally:
    """Count only the first token of each step."""
    firsts: Tally = Counter()
    for outcome, count in counts.items():
        firsts[outcome[:1]] += count
    return firsts


def without_bonus(
    draws: Sequence[SampleOp], logits: NDArray[np.float32], pool: _native.Pool
) -> list[SampleResult | None]:
    """A wrong verifier: a step ends with its last draft token."""
    return [
        drawn._replace(tokens=drawn.tokens[: max(1, len(drawn.path))])
        for drawn in finite(verify_rejection(draws, logits, pool))
    ]


class TestRejection:
    def test_the_tokens_of_a_step_have_the_exact_distribution(self) -> None:
        counts = tally(verify_rejection, draft_seed=1)
        assert is_drawn_from(counts, REJECTION)
        assert is_drawn_from(first_tokens(counts), {(y,): float(P[y]) for y in range(VOCAB)})
        accepted = sum(count for outcome, count in counts.items() if len(outcome) == 2)
        assert accepted / DRAWS == pytest.approx(np.minimum(P, Q).sum(), abs=0.005)

    def test_exact_verification_with_an_independent_draft(self) -> None:
        counts = tally(verify_exact, draft_seed=2)
        assert is_drawn_from(counts, INDEPENDENT)
        assert is_drawn_from(first_tokens(counts), {(y,): float(P[y]) for y in range(VOCAB)})

    def test_a_step_without_the_bonus_token_has_another_distribution(self) -> None:
        assert not is_drawn_from(tally(without_bonus, draft_seed=1, num_draws=FEWER), REJECTION)

    @pytest.mark.parametrize(
        "wrong",
        [lambda p, q: np.maximum(p - q, 0), lambda p, q: p],
        ids=["not normalised", "the target itself"],
    )
    def test_a_step_with_another_residual_has_another_distribution(
        self, wrong: Callable[[Floats, Floats], Floats], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rejection, "residual", wrong)
        monkeypatch.setattr(
            rejection,
            "pick",
            lambda p, uniform: min(int(np.searchsorted(np.cumsum(p), uniform)), VOCAB - 1),
        )
        counts = tally(verify_rejection, draft_seed=1, num_draws=FEWER)
        assert not is_drawn_from(counts, REJECTION)
        assert not is_drawn_from(first_tokens(counts), {(y,): float(P[y]) for y in range(VOCAB)})


def test_residual_and_pick() -> None:
    assert residual(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])).tolist() == [1, 0, 0]
    assert residual(P, P) is P
    p = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [pick(p, u) for u in (1e-9, 0.2499, 0.2501, 1 - 1e-16, 1.0)] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize(
    ("spread", "best", "shared", "independent"),
    [(0.3, 0.90, 0.87, 0.18), (0.7, 0.76, 0.72, 0.17), (1.5, 0.54, 0.48, 0.14)],
)
def test_shared_noise_recovers_nearly_what_rejection_sampling_gains(
    spread: float, best: float, shared: float, independent: float
) -> None:
    """The draft is the target plus noise; the page on speculation has the same numbers."""
    rng, rows = np.random.default_rng(0), 10_000
    target = rng.normal(0, 2, (rows, 50)).astype(np.float32)
    draft = (target + rng.normal(0, spread, target.shape)).astype(np.float32)
    p, q = softmax(target), softmax(draft)
    samplers = [[Sampler(50, [], seed=1) for _ in range(rows)] for _ in range(2)]
    drawn = [
        first_drawn(logits, [SampleOp(i, i, sampler) for i, sampler in enumerate(row_samplers)])
        for logits, row_samplers in zip((target, draft), samplers, strict=True)
    ]
    assert np.minimum(p, q).sum(axis=1).mean() == pytest.approx(best, abs=0.01)
    assert np.equal(*drawn).mean() == pytest.approx(shared, abs=0.015)
    assert (p * q).sum(axis=1).mean() == pytest.approx(independent, abs=0.01)


def test_a_draft_without_probabilities_has_probability_one() -> None:
    """A plain sample decides: the draft token is accepted if the sample has it."""
    sampler, logits = Sampler(VOCAB, [], seed=3), np.stack([TARGET, AFTER[2], AFTER[4]])
    for position in range(50):
        draws = [
            SampleOp(0, position, sampler.clone(0), draft, 1)
            for draft in (NO_DRAFT, DraftTree([2, 4], [-1, -1]))
        ]
        one, tree = finite(verify_rejection(draws, logits, POOL))
        assert tree.tokens[0] == one.tokens[0] and tree.logprobs[0] == one.logprobs[0]
        assert tree.path == {2: [0], 4: [1]}.get(one.tokens[0], [])


def test_logits_that_are_not_finite_fail_only_their_own_sequence() -> None:
    logits = np.stack([TARGET, np.full(VOCAB, np.nan, np.float32)])
    drawn, failed = verify_rejection(
        [SampleOp(i, 0, Sampler(VOCAB, [])) for i in range(2)], logits, POOL
    )
    assert drawn is not None and len(drawn.tokens) == 1
    assert failed is None
