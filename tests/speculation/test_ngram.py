"""Prompt lookup: the longest match first, candidates as one tree, an index that grows."""

import gc
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.batch import DraftTree
from headrace.speculation.proposers.ngram import NgramProposer, _Index, _key


@dataclass(eq=False)
class View:
    known: list[int]
    seq_id: tuple[int, int] = (0, 0)
    prompt_len: int = field(default=1)
    scope: str = ""


def draft(known: list[int], budget: int = 4) -> DraftTree:
    (found,) = NgramProposer(16).propose([View(known)], [budget])
    return found


def test_the_longest_match_is_continued() -> None:
    #      a longer match       a later, shorter one
    known = [1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 1, 2, 3, 4]
    assert draft(known).tokens == [50, 60, 9, 3]


def test_there_is_no_draft_without_a_match() -> None:
    assert draft([1, 2, 3, 4, 5]) == DraftTree([], [])
    assert draft([7]) == DraftTree([], [])


def test_a_repetition_is_continued() -> None:
    assert draft([1, 2, 1, 2, 1, 2], 5)[:2] == ([1, 2, 1, 2, 1], [-1, 0, 1, 2, 3])
    assert draft([1, 2, 3, 1, 2], 7).tokens == [3, 1, 2, 3, 1, 2, 3]  # from its very beginning


def test_candidates_share_the_budget() -> None:
    known = [8, 9, 1, 2, 3, 8, 9, 1, 2, 4, 8, 9, 5, 8, 9]
    found = draft(known, 6)
    assert found[:2] == ([5, 1, 8, 2, 9, 4], [-1, -1, 0, 1, 2, 3])


def test_confidence_rises_with_the_length_of_the_match() -> None:
    text = list(range(100, 140))
    lengths = (2, 3, 4, 7, 8, 15, 16, 30)
    drafts = [draft([*text, 1, *text[:length], 2, *text[:length]]) for length in lengths]
    assert [each.confidence for each in drafts] == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


def test_much_shorter_matches_are_left_out() -> None:
    known = [*range(10, 20), 50, 7, 18, 19, 60, *range(10, 20)]
    assert draft(known, 3).tokens == [50, 7, 18]


def test_of_matches_of_sixteen_tokens_and_more_the_latest_comes_first() -> None:
    text = list(range(100, 120))
    known = [*text, 50, *text[4:], 60, *text]  # all twenty before 50, sixteen before 60
    assert draft(known, 2)[:2] == ([60, 50], [-1, -1])
    assert draft(known[1:], 2)[:2] == ([60, 50], [-1, -1])
    assert draft([*text, 50, *text[5:], 60, *text], 2)[:2] == ([50, 60], [-1, -1])


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 12), max_size=8))
def test_the_index_finds_the_places_of_a_plain_search(known: list[int], more: list[int]) -> None:
    """This holds if tokens are added many at once or one by one."""
    index, length = _Index(), 0
    for count in [*more, len(known)]:
        length = min(len(known), length + count)
        index.extend(known[:length])
    for runs in index._runs:
        for end in range(runs.size, len(known) + 1):
            run = known[end - runs.size : end]
            places = [
                place
                for place in range(runs.size, len(known))
                if known[place - runs.size : place] == run
            ]
            assert list(runs.places(_key(run))) == places[:-5:-1]


def test_the_latest_four_places_of_a_run_are_kept() -> None:
    proposer, view = NgramProposer(16), View([1, 2] * 8)
    proposer.propose([view], [1])
    assert list(proposer._indices[view]._runs[-1].places(_key([1, 2]))) == [14, 12, 10, 8]


def test_memory_of_the_ngram_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.speculation.proposers.ngram._MAX_RUNS", 50)
    proposer, view = NgramProposer(16), View(list(range(1000)))
    proposer.propose([view], [4])
    assert [len(runs._last) for runs in proposer._indices[view]._runs] == [50] * 3
    view.known += [1, 2] * 500
    assert proposer.propose([view], [3])[0].tokens == [1, 2, 1]


def test_the_index_grows_with_the_sequence_and_is_dropped_with_it() -> None:
    proposer, view = NgramProposer(16), View([1, 2, 3])
    proposer.propose([view], [3])
    index = proposer._indices[view]
    for token in [9, 1, 2, 3, 9, 1, 2]:
        view.known.append(token)
        fresh, other = NgramProposer(16), View(list(view.known))
        assert proposer.propose([view], [3]) == fresh.propose([other], [3])
        assert proposer._indices[view] is index
        assert [vars(runs) for runs in index._runs] == [
            vars(runs) for runs in fresh._indices[other]._runs
        ]
    assert proposer.propose([view], [2])[0].tokens == [3, 9]
    assert len(proposer._indices) == 1
    del view
    gc.collect()
    assert not proposer._indices
