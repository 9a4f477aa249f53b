"""A proposer may do anything; the step gets sound guesses or none."""

from typing import Any

import pytest

from headrace.batch import NO_GUESS, Commit, Guess, StepRows
from headrace.errors import RequestError
from headrace.propose import PROPOSERS, Guard, make_proposer
from tests.propose.test_ngram import View


class Says:
    max_nodes = 4

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def propose(self, branches: list[Any], room: list[int]) -> Any:
        self.asked = [branch.key for branch in branches]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, branches: list[Any], commits: list[Commit], rows: StepRows) -> None:
        raise RuntimeError


GOOD = Guess([1, 2], [-1, 0])


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("no"),
        None,
        [],
        [GOOD, GOOD],
        [None],
        [Guess([1], [])],
        [Guess([1], [0])],
        [Guess([1], [-2])],
        [Guess([1, 2], [-1, 1])],
        [Guess([10], [-1])],
        [Guess([-1], [-1])],
        [Guess(["a"], [-1])],  # type: ignore[list-item]
        [Guess([0.5], [-1])],  # type: ignore[list-item]
        [Guess([1] * 4, [-1] * 4)],
    ],
)
def test_rubbish_is_no_guess(answer: Any) -> None:
    guard = Guard(Says(answer), vocab_size=10)
    assert guard.propose([View([1])], [3]) == [NO_GUESS]
    assert guard.failures == 1


def test_one_bad_guess_does_not_take_the_good_ones_before_it() -> None:
    guard = Guard(Says([GOOD, Guess([99], [-1])]), vocab_size=10)
    assert guard.propose([View([1]), View([2])], [3, 3]) == [GOOD, NO_GUESS]


def test_only_branches_with_room_are_asked() -> None:
    inner = Says([GOOD])
    guard = Guard(inner, vocab_size=10)
    assert guard.propose([View([1], (1, 0)), View([2], (2, 0))], [0, 3]) == [NO_GUESS, GOOD]
    assert inner.asked == [(2, 0)]
    assert guard.failures == 0


def test_a_failing_observer_is_counted() -> None:
    guard = Guard(Says([]), vocab_size=10)
    guard.observe([], [], None)  # type: ignore[arg-type]
    assert guard.failures == 1


def test_names() -> None:
    assert {name: make_proposer(name).max_nodes for name in ("off", "ngram")} == {"off": 0, "ngram": 8}
    with pytest.raises(RequestError, match=f"there are: {', '.join(PROPOSERS)}"):
        make_proposer("nrgam")
