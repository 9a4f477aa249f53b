"""`Expand` with a token map draws as from a full row whose other tokens have far lower logits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.logit_ops import Expand, Expanded
from headrace.sampling.host import run_logit_ops

VOCAB = 211
POOL = _native.Pool(2)
FAR_BELOW = np.float32(-1e9)


def packed(allowed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    words = np.zeros((1, (VOCAB + 31) // 32), np.uint32)
    for token in np.flatnonzero(allowed):
        words[0, token // 32] |= np.uint32(1 << int(token % 32))
    return words


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    num_tokens=st.integers(1, VOCAB),
    width=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.1]),
    penalties=st.booleans(),
    is_masked=st.booleans(),
    isa=st.sampled_from(["", "portable"]),
)
def test_a_mapped_row_gives_the_draft_of_the_full_row(
    seed: int,
    num_tokens: int,
    width: int,
    is_masked: bool,
    penalties: bool,
    isa: str,
    **options: Any,
) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.sort(rng.choice(VOCAB, num_tokens, replace=False))
    logits = rng.normal(0, 3, (2, num_tokens)).round(1).astype(np.float32)  # some are equal
    if penalties:
        options |= {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "logit_bias": [(int(t), 2.5) for t in rng.integers(0, VOCAB, 4)],
            "banned": [int(tokens[0])],
            "banned_until": 8,
        }
    allowed = rng.random(VOCAB) < 0.7
    allowed[tokens[-1]] = True
    masks = packed(allowed) if is_masked else None
    can = np.isin(tokens, np.flatnonzero(allowed)) if is_masked else np.ones(num_tokens, bool)
    if penalties:
        can[0] = False
    if not can.any():
        return
    width = min(width, int(can.sum()))

    def sampler() -> _native.Sampler:
        made = _native.Sampler(
            VOCAB, [int(tokens[0]), 7], seq_index=3, seed=seed, isa=isa, **options
        )
        made.append(int(tokens[-1]))
        return made

    full = np.full((2, VOCAB), FAR_BELOW)
    full[:, tokens] = logits
    first, second = sampler(), sampler()
    token_map = _native.TokenMap(tokens.tolist(), VOCAB)
    op = Expand(1, 5, first, 3, width, probabilities=True, masks=masks)
    wanted = run_logit_ops([op], full.copy(), pool=POOL)[0]
    op = op._replace(sampler=second, tokens=token_map)
    got = run_logit_ops([op], logits.copy(), pool=POOL)[0]
    assert isinstance(wanted, Expanded) and isinstance(got, Expanded)
    assert got.tokens == wanted.tokens
    assert got.scores == pytest.approx(wanted.scores, abs=1e-5)
    assert got.probabilities is not None and wanted.probabilities is not None
    assert got.probabilities.tolist() == wanted.probabilities.tolist()
    after = [each.draw(full[0], 6, -1)[0] for each in (first, second)]
    assert after[0] == after[1]


def test_a_row_without_an_allowed_token_gives_nothing() -> None:
    allowed = np.ones(VOCAB, bool)
    allowed[[3, 40]] = False
    token_map = _native.TokenMap([3, 40], VOCAB)
    op = Expand(0, 0, _native.Sampler(VOCAB, []), 0, 1, False, packed(allowed), token_map)
    assert run_logit_ops([op], np.zeros((1, 2), np.float32), pool=POOL) == [None]


def test_greedy_scores_are_log_probabilities() -> None:
    logits = np.array([[0.0, 2.0, 1.0, -1.0]], np.float32)
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    op = Expand(0, 0, _native.Sampler(4, [], temperature=0), 0, 3, False)
    value = run_logit_ops([op], logits.copy(), pool=POOL)[0]
    assert isinstance(value, Expanded) and value.tokens == [1, 2, 0]
    assert value.scores == pytest.approx(expected[value.tokens], abs=1e-6)


def test_scores_of_samples_are_shares_of_noisy_logits() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (1, 64)).astype(np.float32)
    for seed in range(20):
        sampler = _native.Sampler(64, [], seed=seed)
        value = run_logit_ops([Expand(0, 9, sampler, 0, 64, False)], logits.copy(), pool=POOL)[0]
        assert isinstance(value, Expanded) and len(value.tokens) == 64
        assert value.scores == sorted(value.scores, reverse=True)  # best first under the noise
        assert np.exp(value.scores).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([2, 1], "ascend"), ([1, 1], "ascend"), ([9], "outside"), ([-1], "outside"), ([], "needs")],
)
def test_token_maps_are_checked(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.TokenMap(tokens, 9)


def test_a_map_of_another_vocabulary_is_refused() -> None:
    op = Expand(0, 0, _native.Sampler(9, []), 0, 1, False, tokens=_native.TokenMap([1], 8))
    with pytest.raises(ValueError, match="another vocabulary"):
        run_logit_ops([op], np.zeros((1, 1), np.float32), pool=POOL)
