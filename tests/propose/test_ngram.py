"""Prompt lookup: longest match first, several candidates as one tree, an index that grows with the branch."""

import gc
from dataclasses import dataclass, field

from headrace.batch import Guess
from headrace.propose.ngram import Ngram, merge


@dataclass(eq=False)
class View:
    known: list[int]
    key: tuple[int, int] = (0, 0)
    prompt_len: int = field(default=1)


def guess(known: list[int], room: int = 4) -> Guess:
    (found,) = Ngram().propose([View(known)], [room])
    return found


def test_continues_the_longest_match() -> None:
    #      a longer match       a later, shorter one
    known = [1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 1, 2, 3, 4]
    assert guess(known).tokens == [50, 60, 9, 3]


def test_nothing_to_go_by() -> None:
    assert guess([1, 2, 3, 4, 5]) == Guess([], [])
    assert guess([7]) == Guess([], [])


def test_a_repetition_goes_on() -> None:
    assert guess([1, 2, 1, 2, 1, 2], 5) == Guess([1, 2, 1, 2, 1], [-1, 0, 1, 2, 3])


def test_candidates_share_the_room() -> None:
    known = [8, 9, 1, 2, 3, 8, 9, 1, 2, 4, 8, 9, 5, 8, 9]
    found = guess(known, 6)
    assert found == Guess([5, 1, 8, 2, 9, 4], [-1, -1, 0, 1, 2, 3])


def test_merge_joins_common_beginnings() -> None:
    assert merge([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 9) == Guess([1, 2, 5, 3, 4, 6], [-1, 0, 0, 1, 1, 2])
    assert merge([[1, 2], [1, 2]], 9) == Guess([1, 2], [-1, 0])
    assert merge([], 9) == Guess([], [])


def test_the_index_follows_the_branch_and_goes_with_it() -> None:
    proposer, view = Ngram(), View([1, 2, 3])
    for token in [9, 1, 2, 3, 9, 1, 2]:
        view.known.append(token)
        assert proposer.propose([view], [3]) == Ngram().propose([View(list(view.known))], [3])
    assert proposer.propose([view], [2])[0].tokens == [3, 9]
    assert len(proposer._indices) == 1
    del view
    gc.collect()
    assert not proposer._indices
