"""Exact verification returns the tokens of plain sampling, for any draft tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.batch import DraftTree
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.host import run_logit_ops

VOCAB = 4
POOL = _native.Pool(2)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=12))
    return DraftTree(tokens, [draw(st.integers(-1, node - 1)) for node in range(len(tokens))])


@settings(max_examples=100, deadline=None)
@given(drafts=st.lists(trees(), max_size=4), seed=st.integers(0, 99))
def test_exact_verification_returns_the_tokens_of_plain_sampling(
    drafts: list[DraftTree], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 1, (100, VOCAB)).astype(np.float32)
    draws, samplers, row = [], [], 0
    for source, draft in enumerate(drafts):
        sampler = _native.Sampler(VOCAB, [], seed=seed + source, presence_penalty=0.5)
        samplers.append(sampler.clone(0))
        draws.append(SampleOp(row, 10 * source, sampler, draft, 1))
        row += 1 + len(draft.tokens)
    values = run_logit_ops(draws, logits, pool=POOL)
    for source, (draw, drawn, sampler) in enumerate(zip(draws, values, samplers, strict=True)):
        assert (
            isinstance(drawn, SampleResult)
            and len(drawn.tokens) == len(drawn.logprobs) == len(drawn.path) + 1
        )
        node, draft = -1, draw.draft
        for depth, (token, logprobs) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
            assert (token, tuple(logprobs)) == sampler.draw(
                logits[draw.row + 1 + node], 10 * source + depth, 1
            )
            children = [
                i
                for i in range(len(draft.tokens))
                if (draft.parents[i], draft.tokens[i]) == (node, token)
            ]
            assert children[:1] == drawn.path[depth : depth + 1]
            node = children[0] if children else node


@pytest.mark.parametrize("bad", [0, 1])
def test_exact_verification_fails_only_the_sequence_with_a_row_that_is_not_finite(bad: int) -> None:
    logits = np.array([[9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]], np.float32)
    logits[bad] = np.nan
    first, second = (_native.Sampler(VOCAB, [], temperature=0.0) for _ in range(2))
    draws = [
        SampleOp(0, 0, first, DraftTree([0, 2], [-1, -1])),
        SampleOp(2, 0, second, DraftTree([2], [-1])),
    ]
    assert run_logit_ops(draws, logits, pool=POOL) == [None, SampleResult([2, 3], [0], [])]
