"""Exact verification: what a tree accepts is what drawing token by token gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.accept.exact import Verification, verify_exact
from headrace.batch import Commit, DraftTree

VOCAB = 4
POOL = _native.Pool(2)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=12))
    return DraftTree(tokens, [draw(st.integers(-1, node - 1)) for node in range(len(tokens))])


@settings(max_examples=100, deadline=None)
@given(drafts=st.lists(trees(), max_size=4), seed=st.integers(0, 99))
def test_the_tokens_are_those_of_draws_one_by_one(drafts: list[DraftTree], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 1, (100, VOCAB)).astype(np.float32)
    verifications, row = [], 0
    for source, draft in enumerate(drafts):
        sampler = _native.Sampler(VOCAB, [], seed=seed + source, presence_penalty=0.5)
        verifications.append(Verification(Commit(source, [], [], []), sampler, draft, row, 10 * source, 1))
        row += 1 + len(draft.tokens)
    rows, samplers = [verification.row for verification in verifications], [verification.sampler.clone(0) for verification in verifications]
    assert verify_exact(verifications, logits, POOL) == set()
    for source, (draft, first, sampler) in enumerate(zip(drafts, rows, samplers, strict=True)):
        commit = verifications[source].commit
        assert len(commit.tokens) == len(commit.logprobs) == len(commit.path) + 1
        node = -1
        for depth, (token, logprobs) in enumerate(zip(commit.tokens, commit.logprobs, strict=True)):
            assert (token, tuple(logprobs)) == sampler.draw(logits[first + 1 + node], 10 * source + depth, 1)
            children = [i for i in range(len(draft.tokens)) if (draft.parents[i], draft.tokens[i]) == (node, token)]
            assert children[:1] == commit.path[depth : depth + 1]
            node = children[0] if children else node


@pytest.mark.parametrize("bad", [0, 1])
def test_a_row_that_is_not_finite_fails_its_own_sequence(bad: int) -> None:
    logits = np.array([[9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]], np.float32)
    logits[bad] = np.nan
    samplers = [_native.Sampler(VOCAB, [], temperature=0.0) for _ in range(2)]
    verifications = [
        Verification(Commit(i + 5, [], [], []), sampler, DraftTree([0, 2], [-1, -1]), 2 * i, 0, -1) for i, sampler in enumerate(samplers)
    ]
    verifications[1].draft = DraftTree([2], [-1])
    assert verify_exact(verifications, logits, POOL) == {5}
    assert verifications[1].commit == Commit(6, [0], [2, 3], [])
