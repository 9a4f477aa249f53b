"""The native ranking of the beams of a search, against a plain one that sorts all candidates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.constraint import mask_of
from headrace.logit_ops import RankBeams, RankedBeams
from headrace.sampling.host import run_logit_ops
from tests.sampling.test_sampler import ISAS

POOLS = [_native.Pool(threads) for threads in (1, 2, 3)]


def trie_of(sequences: Sequence[Sequence[int]], vocab: int) -> _native.TokenTrie:
    tokens = np.array([token for sequence in sequences for token in sequence], np.int32)
    ends = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    return _native.TokenTrie(tokens, ends, vocab)


def ranking(samplers: list[_native.Sampler], totals: list[float], **options: Any) -> RankBeams:
    given = {"num_candidates": 3, "all_count": False, "end_ids": [], **options}
    return RankBeams(
        rows=list(range(len(totals))), position=5, samplers=samplers, totals=totals, **given
    )


def plain_ranking(
    logprobs: list[list[float]],
    totals: list[float],
    allowed: list[set[int]],
    leaves: list[set[int]],
    count: int,
    all_count: bool,
    end_ids: set[int],
) -> RankedBeams:
    """Sort every candidate; `leaves` are the tokens of each beam that end it in a trie."""
    candidates = sorted(
        (-total - row[token], beam, token)
        for beam, (total, row) in enumerate(zip(totals, logprobs, strict=True))
        for token in allowed[beam]
        if row[token] > -np.inf
    )
    result = RankedBeams([], [], [], [])
    for loss, beam, token in candidates:
        ends = token in end_ids or token in leaves[beam]
        for values, value in zip(result, (beam, token, -loss, ends), strict=True):
            values.append(value)
        count -= all_count or not ends
        if not count:
            break
    return result


def logprobs_of(logits: NDArray[np.float32], isa: str) -> list[float]:
    """The log-probabilities of all tokens of a row."""
    vocab = len(logits)
    _, _, ids, logprobs = _native.token_logprobs(logits, 0, vocab, isa)
    found = dict(zip(ids, logprobs, strict=True))
    return [found.get(token, -np.inf) for token in range(vocab)]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), isa=st.sampled_from(ISAS))
def test_ranking_equals_a_sort_of_all_candidates(data: st.DataObject, isa: str) -> None:
    vocab = data.draw(st.sampled_from([5, 16, 33, 300]))
    num_beams = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 3, (num_beams, vocab)).astype(np.float32)
    if data.draw(st.booleans()):  # many equal logits
        logits = np.round(logits)
    logits[rng.random((num_beams, vocab)) < 0.1] = -np.inf
    logits[:, 0] = 0.5
    totals = np.round(-rng.random(num_beams) * 4, data.draw(st.sampled_from([0, 9]))).tolist()
    token = st.integers(0, vocab - 1)
    end_ids = data.draw(st.lists(token, max_size=4, unique=True))
    count = data.draw(st.sampled_from([1, 3, 20, 2000]))
    all_count = data.draw(st.booleans())
    options: dict[str, Any] = {"num_candidates": count, "all_count": all_count, "end_ids": end_ids}

    allowed = [set(range(vocab))] * num_beams
    leaves: list[set[int]] = [set()] * num_beams
    kind = data.draw(st.sampled_from(["all", "masks", "trie"]))
    if kind == "masks":
        allowed = [set(rng.choice(vocab, 3).tolist()) for _ in range(num_beams)]
        options["masks"] = np.stack([mask_of(ids, vocab) for ids in allowed])
    if kind == "trie":
        sequences = rng.integers(0, vocab, (12, 3)).tolist()
        sequences = [one[: rng.integers(1, 4)] for one in sequences]
        trie = options["trie"] = trie_of(sequences, vocab)
        starts = [tuple(one[: rng.integers(0, 3)]) for one in sequences[:num_beams]]
        num_beams = len(starts)
        options["nodes"] = [node_of(trie, start) for start in starts]
        allowed, leaves = following(sequences, starts, set(end_ids))

    samplers = [_native.Sampler(vocab, [], isa=isa) for _ in range(num_beams)]
    op = ranking(samplers, totals[:num_beams], **options)
    rows = [logprobs_of(row, isa) for row in logits[:num_beams]]
    expected = plain_ranking(
        rows, op.totals, allowed, leaves, count=count, all_count=all_count, end_ids=set(end_ids)
    )
    for pool in POOLS:
        assert run_logit_ops([op], logits, pool=pool) == [expected]


def node_of(trie: _native.TokenTrie, tokens: Sequence[int]) -> int:
    node = 0
    for token in tokens:
        node = trie.child(node, token)
    return node


def following(
    sequences: list[list[int]], starts: list[tuple[int, ...]], end_ids: set[int]
) -> tuple[list[set[int]], list[set[int]]]:
    """The tokens that sequences allow after each start, and those that end a sequence."""
    allowed, leaves = [], []
    for start in starts:
        longer = [one for one in sequences if tuple(one[: len(start)]) == start]
        tokens = {one[len(start)] for one in longer if len(one) > len(start)}
        inner = {one[len(start)] for one in longer if len(one) > len(start) + 1}
        is_complete = any(len(one) == len(start) for one in longer)
        allowed.append(tokens | (end_ids if is_complete else set()))
        leaves.append(tokens - inner)
    return allowed, leaves


def test_penalties_and_bans_apply_before_the_ranking() -> None:
    logits = np.array([[0.0, 1.0, 0.5, -1.0]] * 2, np.float32)
    fresh = _native.Sampler(4, [], presence_penalty=2.0, banned=[2], banned_until=6)
    seen = fresh.clone(0)
    seen.append(1)
    (ranked,) = run_logit_ops([ranking([fresh, seen], [0.0, 0.0], num_candidates=9)], logits)
    assert isinstance(ranked, RankedBeams)
    assert list(zip(ranked.beams, ranked.tokens, strict=True)) == [
        (0, 1), (1, 0), (0, 0), (1, 1), (1, 3), (0, 3),
    ]  # fmt: skip
    for beam in (0, 1):
        shares = [np.exp(t) for b, t in zip(ranked.beams, ranked.totals, strict=True) if b == beam]
        assert sum(shares) == pytest.approx(1)


def test_a_mask_does_not_change_log_probabilities() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (1, 70)).astype(np.float32)
    (ranked,) = run_logit_ops(
        [ranking([_native.Sampler(70, [])], [0.0], masks=mask_of([3, 69], 70)[None])], logits
    )
    assert isinstance(ranked, RankedBeams) and sorted(ranked.tokens) == [3, 69]
    assert ranked.totals == [_native.token_logprobs(logits[0], t, 0)[0] for t in ranked.tokens]


def test_arguments_of_a_ranking_are_checked() -> None:
    pool, logits = POOLS[0], np.zeros((2, 8), np.float32)
    samplers = [_native.Sampler(8, []) for _ in range(2)]
    good = ranking(samplers, [0.0, -1.0])
    trie = trie_of([[1, 2]], 8)
    for changes, message in (
        ({"rows": [0]}, "each beam needs"),
        ({"totals": [0.0]}, "each beam needs"),
        ({"rows": [], "samplers": [], "totals": []}, "each beam needs"),
        ({"rows": [0, 2]}, "not there"),
        ({"rows": [-1, 0]}, "not there"),
        ({"num_candidates": 0}, "above 0"),
        ({"samplers": [samplers[0]] * 2}, "a sampler of its own"),
        ({"samplers": [samplers[0], _native.Sampler(9, [])]}, "as wide"),
        ({"masks": np.ones((1, 1), np.uint32)}, "rows, words"),
        ({"trie": trie}, "a node of the trie"),
        ({"nodes": [0, 0]}, "a node of the trie"),
        ({"trie": trie, "nodes": [0, 3]}, "a node that is not there"),
        ({"trie": trie_of([[1]], 9), "nodes": [0, 0]}, "another vocabulary"),
        ({"trie": trie, "nodes": [0, 0], "masks": np.ones((2, 1), np.uint32)}, "masks or a trie"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.rank_beams(pool, logits, [good._replace(**changes)])


def test_a_row_that_is_not_finite_has_no_ranking() -> None:
    logits = np.zeros((2, 8), np.float32)
    logits[1, 3] = np.nan
    samplers = [_native.Sampler(8, []) for _ in range(2)]
    assert run_logit_ops([ranking(samplers, [0.0, 0.0])], logits) == [None]


class TestTrie:
    SEQUENCES = ([3, 1, 2], [3, 1], [5], [3, 4, 4], [5], [0, 7])

    def test_nodes(self) -> None:
        trie = trie_of(self.SEQUENCES, 40)
        assert (trie.num_nodes, trie.num_sequences) == (9, 5)
        assert {
            start: (trie.is_complete(node), trie.is_leaf(node))
            for start in ((), (3,), (3, 1), (3, 1, 2), (5,), (0,), (0, 7))
            if (node := node_of(trie, start)) >= 0
        } == {
            (): (False, False),
            (3,): (False, False),
            (3, 1): (True, False),
            (3, 1, 2): (True, True),
            (5,): (True, True),
            (0,): (False, False),
            (0, 7): (True, True),
        }
        assert trie.child(0, 4) == trie.child(node_of(trie, (5,)), 5) == -1

    def test_masks(self) -> None:
        trie = trie_of(self.SEQUENCES, 40)
        mask = np.full(2, 7, np.uint32)
        for start, tokens in (((), [0, 3, 5]), ((3,), [1, 4]), ((5,), [])):
            trie.fill(node_of(trie, start), mask)
            assert mask.tolist() == mask_of(tokens, 40).tolist()
        with pytest.raises(ValueError, match="words"):
            trie.fill(0, np.zeros(1, np.uint32))

    def test_tokens_before_the_end(self) -> None:
        trie = trie_of(self.SEQUENCES, 40)
        assert [trie.inner_token([token]) for token in (3, 1, 4, 2, 5, 7)] == [3, 1, 4, -1, -1, -1]
        assert trie.inner_token([7, 5, 0, 2]) == 0

    @pytest.mark.parametrize(
        ("tokens", "starts", "message"),
        [
            ([1], [0], "starts must"),
            ([1], [0, 2], "starts must"),
            ([1], [1, 1], "starts must"),
            ([1], [0, 0, 1], "needs a token"),
            ([1, 1], [0, 3, 2], "needs a token"),
            ([8], [0, 1], "not in the vocabulary"),
            ([-1], [0, 1], "not in the vocabulary"),
        ],
    )
    def test_invalid_sequences_are_refused(
        self, tokens: list[int], starts: list[int], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            _native.TokenTrie(np.array(tokens, np.int32), np.array(starts, np.int32), 8)

    def test_a_node_that_is_not_there_is_refused(self) -> None:
        trie = trie_of(self.SEQUENCES, 40)
        for node in (-1, 9):
            with pytest.raises(ValueError, match="no such node"):
                trie.child(node, 1)
