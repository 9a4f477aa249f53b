"""The online table of followers, which learns while the engine serves."""

import gc

from headrace.batch import NO_DRAFT, DraftTree
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.online import OnlineProposer
from tests.engine.toy import toy_engine
from tests.speculation.test_ngram import View
from tests.tiny import run_all


def taught(*sequences: list[int], max_runs: int = 1000) -> OnlineProposer:
    """A table that has learned these sequences."""
    table = OnlineProposer(16, max_runs=max_runs)
    for tokens in sequences:
        table.propose([View(tokens)], [1])
    return table


def test_drafts_continue_as_another_sequence_did() -> None:
    table = taught([1, 2, 3, 4, 5, 6, 7])
    (draft,) = table.propose([View([9, 2, 3])], [3])
    assert draft == DraftTree([4, 5, 6], [-1, 0, 1])
    (draft,) = table.propose([View([1, 2, 3, 4])], [8])
    assert draft[:3] == ([5, 6, 7], [-1, 0, 1], 1)
    assert table.propose([View([7, 8]), View([5])], [3, 3]) == [NO_DRAFT, NO_DRAFT]


def test_the_latest_follower_comes_first_and_the_one_before_it_second() -> None:
    (draft,) = taught([1, 2, 3, 4], [1, 2, 5, 6]).propose([View([1, 2])], [4])
    assert draft[:2] == ([5, 3, 6, 4], [-1, -1, 0, 1])


def test_the_longest_known_run_decides() -> None:
    table = taught([1, 2, 3, 4, 5, 6, 7, 8, 9, 20], [99, 3, 4, 5, 6, 7, 8, 9, 30])
    assert table.propose([View([1, 2, 3, 4, 5, 6, 7])], [3])[0].tokens == [
        8,
        9,
        20,
    ]  # eight tokens before 20, seven before 30
    view = View([0, 1, 2, 3, 4, 5, 6, 7, 8])
    for length, confidence in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        assert table.propose([View(view.known[:length])], [1])[0].confidence == confidence


def test_a_sequence_is_learned_as_it_grows_and_when_it_ends() -> None:
    table, view = OnlineProposer(16), View([1, 2, 3, 4])
    assert table.propose([view, View([2, 3])], [4, 4])[1].tokens == [4]
    transcript = table._transcripts[view]
    view.known += [5, 6]
    table.propose([view], [1])
    assert table._transcripts[view] is transcript
    view.known += [7, 8]
    assert table.propose([View([5, 6])], [4]) == [
        NO_DRAFT
    ]  # no draft has been asked for the first since
    del view
    gc.collect()
    assert table.propose([View([5, 6])], [4])[0].tokens == [7, 8]


def test_prompts_are_not_learned() -> None:
    table = OnlineProposer(16)
    table.propose([View([1, 2, 3, 4], prompt_len=4)], [4])
    assert table.propose([View([1, 2])], [4]) == [NO_DRAFT]


def test_drafts_do_not_cross_scopes() -> None:
    table = OnlineProposer(16)
    table.propose([View([1, 2, 3, 4], scope="a")], [4])
    assert table.propose([View([1, 2], scope="b"), View([1, 2], scope="a")], [4, 4]) == [
        NO_DRAFT,
        DraftTree([3, 4], [-1, 0]),
    ]


def test_memory_is_bounded_and_used_runs_are_kept() -> None:
    table = taught([1, 2, 3], max_runs=20)
    for start in range(10, 200, 2):
        assert table.propose([View([start, start + 1, start + 2]), View([1, 2])], [1, 1])[
            1
        ].tokens == [3]
    assert len(table._followers) == 20


def test_acceptance_rises_over_a_repeated_workload() -> None:
    engine = toy_engine(proposer=OnlineProposer(16))
    requests = [([token, 3, 4], SamplingParams(temperature=0, max_tokens=30)) for token in range(8)]
    steps, texts = [], []
    for _ in range(3):
        before = engine.stats().steps
        texts.append([result.outputs[0].token_ids for result in run_all(engine, requests)])
        steps.append(engine.stats().steps - before)
    assert texts[0] == texts[1] == texts[2]
    assert steps[0] > 2 * steps[1] >= 2 * steps[2]
    drafts = engine.stats().drafts["test"]
    assert drafts.accepted > 300 and engine.stats().proposer_failures == 0
