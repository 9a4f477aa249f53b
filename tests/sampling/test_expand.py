"""`Expand` returns the sample of the sequence, then the next best tokens under the same noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.logit_ops import Expand, Expanded
from headrace.sampling.host import run_logit_ops

VOCAB = 9
POOL = _native.Pool(2)


@settings(max_examples=100, deadline=None)
@given(
    widths=st.lists(st.integers(1, VOCAB + 2), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.7]),
    penalty=st.sampled_from([0.0, 0.5]),
    bad=st.integers(0, 9),
)
def test_expand_returns_the_tokens_of_samples_one_by_one(
    widths: list[int], seed: int, temperature: float, penalty: float, bad: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 1, (len(widths), VOCAB)).astype(np.float32)
    logits[bad:, 3] = np.nan
    samplers = [
        _native.Sampler(
            VOCAB, [1], seq_index=i, seed=seed, temperature=temperature, presence_penalty=penalty
        )
        for i in range(len(widths))
    ]
    before = [sampler.clone(i) for i, sampler in enumerate(samplers)]
    last = len(widths) - 1
    ops = [Expand(last - i, 5, samplers[i], i, width, i % 2 == 0) for i, width in enumerate(widths)]
    values = run_logit_ops(ops, logits.copy(), pool=POOL)
    for op, value, initial, sampler in zip(ops, values, before, samplers, strict=True):
        row = logits[op.row].copy()
        if op.row >= bad:
            assert value is None
            continue
        assert isinstance(value, Expanded) and len(value.tokens) == min(op.width, VOCAB)
        assert (value.probabilities is None) == (not op.probabilities)
        if value.probabilities is not None:
            assert value.probabilities.tolist() == initial.probabilities(row, 5).tolist()
        for token in value.tokens:
            assert token == initial.clone(op.seq_index).draw(row, 5, -1)[0]
            row[token] = -np.inf
        initial.append(value.tokens[0])  # and no other token
        assert (
            sampler.probabilities(logits[op.row], 6).tolist()
            == initial.probabilities(logits[op.row], 6).tolist()
        )


def test_expand_checks_its_arguments() -> None:
    sampler, logits = _native.Sampler(VOCAB, []), np.zeros((2, VOCAB), np.float32)
    with pytest.raises(ValueError, match="width must be above 0"):
        _native.expand(POOL, logits, [Expand(0, 0, sampler, 0, 0, False)])
    with pytest.raises(ValueError, match="expanded once"):
        _native.expand(
            POOL, logits, [Expand(1, 0, one, 0, 1, False) for one in (sampler, sampler.clone(1))]
        )
    with pytest.raises(ValueError, match="not there"):
        _native.expand(POOL, logits, [Expand(2, 0, sampler, 0, 1, False)])
    logits.flags.writeable = False
    with pytest.raises(TypeError):
        _native.expand(POOL, logits, [Expand(0, 0, sampler, 0, 1, False)])
