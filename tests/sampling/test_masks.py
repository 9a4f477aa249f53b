"""Masks in the sampler: a forbidden token is never sampled, ranked or drafted."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import DraftTree
from headrace.config import AcceptanceMethod
from headrace.constraint import mask_of, mask_words
from headrace.logit_ops import Expand, Expanded, RankBeams, RankedBeams, SampleOp, SampleResult
from headrace.sampling.host import VERIFIERS, run_logit_ops
from tests.sampling import sampler_twin as twin
from tests.sampling.test_sampler import FILTERS, ISAS, rows

POOL = _native.Pool(2)
VOCAB = 70


def masks_of(*allowed: list[int], vocab: int = VOCAB) -> NDArray[np.uint32]:
    return np.stack([mask_of(ids, vocab) for ids in allowed])


def logits_of(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab)).astype(np.float32)


def test_a_mask_has_a_bit_for_each_token() -> None:
    mask = mask_of([0, 31, 32, 69], VOCAB)
    assert (
        mask.tolist() == [1 << 31 | 1, 1, 1 << 5] and mask_words(VOCAB) == 3 and mask_words(64) == 2
    )
    assert mask_of([], VOCAB).tolist() == [0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(row=rows(), options=st.fixed_dictionaries(FILTERS), data=st.data())
def test_masked_samples_match_the_twin(
    row: NDArray[np.float32], options: dict[str, Any], data: st.DataObject
) -> None:
    vocab = len(row)
    finite = np.flatnonzero(np.isfinite(row)).tolist()
    token = st.integers(0, vocab - 1)
    allowed = data.draw(
        st.one_of(st.sets(token, max_size=4), st.just(set(range(0, vocab, 2))))
        | st.just(set(range(vocab)))
    )
    mask = mask_of({*allowed, data.draw(st.sampled_from(finite))}, vocab)
    biases = data.draw(st.dictionaries(token, st.sampled_from([-100.0, 30.0]), max_size=3))
    isa = data.draw(st.sampled_from(ISAS))
    native = _native.Sampler(vocab, [0], isa=isa, logit_bias=list(biases.items()), **options)
    reference = twin.SamplerTwin(vocab, [0], logit_bias=list(biases.items()), **options)
    for position in (10, 11, 12):
        drawn, logprobs = native.draw(row, position, 0, mask[None])
        assert drawn in reference.draws(row, position, mask) and logprobs == _native.token_logprobs(
            row, drawn, 0, isa
        )
        reference.output.append(drawn)
    shares = native.probabilities(row, 13, mask[None])
    kept = set(np.flatnonzero(shares).tolist())
    assert (
        kept
        and all(mask[i // 32] >> np.uint32(i % 32) & 1 for i in kept)
        and shares.sum() == pytest.approx(1)
    )


def test_a_mask_that_allows_all_changes_nothing() -> None:
    logits, everything = logits_of(1)[0], masks_of(list(range(VOCAB)))
    plain, masked = (_native.Sampler(VOCAB, [], seed=3, top_p=0.9) for _ in range(2))
    assert [plain.draw(logits, p, 2) for p in range(40)] == [
        masked.draw(logits, p, 2, everything) for p in range(40)
    ]


@pytest.mark.parametrize("method", list(VERIFIERS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_of_a_draft_tree_has_its_own_mask(
    method: AcceptanceMethod, temperature: float
) -> None:
    tree = DraftTree([5, 6, 7], [-1, 0, -1])
    logits, masks = logits_of(5), masks_of([5], [6, 7], [68], [9])
    sampler = _native.Sampler(VOCAB, [], temperature=temperature, seed=1)
    logits[2, 7] = -60.0
    (drawn,) = run_logit_ops([SampleOp(1, 0, sampler, tree, 1, method, masks)], logits)
    assert isinstance(drawn, SampleResult)
    assert (drawn.tokens, drawn.path) == ([5, 6, 68], [0, 1])
    raw = [
        _native.token_logprobs(logits[row], token, 1)
        for row, token in zip((1, 2, 3), drawn.tokens, strict=True)
    ]
    assert [tuple(one) for one in drawn.logprobs] == raw


def test_expand_returns_tokens_that_the_mask_allows() -> None:
    logits, allowed = logits_of(2), [3, 40, 69]
    (drafted,) = run_logit_ops(
        [Expand(1, 0, _native.Sampler(VOCAB, [], seed=5), 0, 5, True, masks_of(allowed))],
        logits.copy(),
    )
    assert isinstance(drafted, Expanded) and drafted.probabilities is not None
    assert (
        sorted(drafted.tokens) == allowed
        and np.flatnonzero(drafted.probabilities).tolist() == allowed
    )
    assert drafted.tokens[0] == twin.SamplerTwin(VOCAB, [], seed=5).draw(
        logits[1], 0, mask_of(allowed, VOCAB)
    )


def ranking(sampler: _native.Sampler, count: int, masks: Any) -> RankBeams:
    """The ranking of a single beam, at the first row."""
    return RankBeams(
        rows=[0],
        position=0,
        samplers=[sampler],
        totals=[0.0],
        num_candidates=count,
        all_count=False,
        end_ids=[],
        masks=masks,
    )


def test_a_mask_that_forbids_all_gives_no_result() -> None:
    logits = logits_of(2)
    logits[0, [3, 4]] = -np.inf
    samplers = [_native.Sampler(VOCAB, [], banned=[9], banned_until=5) for _ in range(4)]
    draws = [
        SampleOp(0, 0, samplers[0], masks=masks_of([3, 4])),
        SampleOp(1, 0, samplers[1], masks=masks_of([3, 4])),
    ]
    failed, drawn = run_logit_ops(draws, logits)
    assert failed is None and isinstance(drawn, SampleResult) and drawn.tokens[0] in (3, 4)
    assert run_logit_ops([SampleOp(1, 0, samplers[2], masks=masks_of([9]))], logits) == [None]
    assert run_logit_ops([ranking(samplers[3], 2, masks_of([9]))], logits) == [
        RankedBeams(beams=[], tokens=[], totals=[], ends=[])
    ]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (np.zeros((1, 3), np.uint32), "allows no token"),
        (np.array([[0, 0, 1 << 6]], np.uint32), "allows no token"),
        (np.ones((1, 2), np.uint32), "rows, words"),
        (np.ones((2, 3), np.uint32), "rows, words"),
        (np.ones(3, np.uint32), "rows, words"),
        (np.ones((1, 1, 3), np.uint32), "rows, words"),
        (np.ones((1, 3), np.int64), "uint32"),
        (np.ones((1, 3), np.float32), "uint32"),
        (np.ones((1, 6), np.uint32)[:, ::2], "uint32"),
        ([[1, 1, 1]], "uint32"),
        (7, "uint32"),
    ],
)
def test_invalid_masks_are_refused(masks: Any, message: str) -> None:
    sampler, logits = _native.Sampler(VOCAB, []), logits_of(1)
    with pytest.raises(ValueError, match=message):
        sampler.draw(logits[0], 0, -1, masks)
    with pytest.raises(ValueError, match=message):
        sampler.probabilities(logits[0], 0, masks)
    for op, run in (
        (SampleOp(0, 0, sampler, masks=masks), _native.verify_exact),
        (ranking(sampler, 1, masks), _native.rank_beams),
        (Expand(0, 0, sampler, 0, 1, False, masks), _native.expand),
    ):
        with pytest.raises(ValueError, match=message):
            run(POOL, logits, [op])  # type: ignore[operator]


def test_a_tree_needs_a_mask_for_each_row() -> None:
    op = SampleOp(0, 0, _native.Sampler(VOCAB, []), DraftTree([1], [-1]), masks=masks_of([1]))
    with pytest.raises(ValueError, match="rows, words"):
        _native.verify_exact(POOL, logits_of(2), [op])
