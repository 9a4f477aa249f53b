"""The table that learns while serving."""

from headrace.batch import NO_GUESS, Commit, Guess, StepRows
from headrace.propose.online import Online
from headrace.request import SamplingParams
from tests.engine.toy import toy_engine
from tests.propose.test_ngram import View
from tests.tiny import run_all

ROWS = StepRows(None, None)  # type: ignore[arg-type]


def taught(*lines: list[int], max_runs: int = 1000) -> Online:
    table = Online(max_runs=max_runs)
    for line in lines:
        for end in range(2, len(line) + 1):
            table.observe([View(line[:end])], [Commit(0, [], line[end - 1 : end], [])], ROWS)
    return table


def test_what_followed_elsewhere() -> None:
    table = taught([1, 2, 3, 4, 5, 6, 7])
    (guess,) = table.propose([View([9, 2, 3])], [3])
    assert guess == Guess([4, 5, 6], [-1, 0, 1])
    (guess,) = table.propose([View([1, 2, 3, 4])], [8])
    assert guess[:3] == ([5, 6, 7], [-1, 0, 1], 1)
    assert table.propose([View([7, 8]), View([5])], [3, 3]) == [NO_GUESS, NO_GUESS]


def test_the_latest_goes_first_and_the_one_before_beside_it() -> None:
    (guess,) = taught([1, 2, 3, 4], [1, 2, 5, 6]).propose([View([1, 2])], [4])
    assert guess[:2] == ([5, 3, 6, 4], [-1, -1, 0, 1])


def test_several_tokens_at_once_and_forks() -> None:
    table = Online()
    table.observe([View([1, 2, 3, 4])], [Commit(0, [], [3, 4], [])], ROWS)
    assert table.propose([View([1, 2])], [4])[0].tokens == [3, 4]
    table.observe([View([7, 8, 9])], [Commit(0, [], [9], []), Commit(0, [], [5], [])], ROWS)
    assert set(table.propose([View([7, 8])], [4])[0].tokens) == {9, 5}


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    table = taught([1, 2, 3], max_runs=20)
    for start in range(10, 200, 2):
        table.observe([View([start, start + 1, start + 2])], [Commit(0, [], [start + 2], [])], ROWS)
        assert table.propose([View([1, 2])], [1])[0].tokens == [3]
    assert len(table._followers) == 20


def test_acceptance_rises_over_a_repeated_workload() -> None:
    engine = toy_engine(proposer=Online())
    requests = [([token, 3, 4], SamplingParams(temperature=0, max_tokens=30)) for token in range(8)]
    steps, texts = [], []
    for _ in range(3):
        before = engine.stats().steps
        texts.append([result.outputs[0].token_ids for result in run_all(engine, requests)])
        steps.append(engine.stats().steps - before)
    assert texts[0] == texts[1] == texts[2]
    assert steps[0] > 2 * steps[1] >= 2 * steps[2]
    books = engine.stats().guesses["test"]
    assert books.accepted > 300 and engine.stats().proposer_failures == 0
