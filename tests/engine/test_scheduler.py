"""The scheduler: rows, order and preemption."""

from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.scheduled import RowBudget, ScheduledSequence, SchedulerOutput
from headrace.kv.manager import Copy
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.random_trees import RandomTrees
from tests.tiny import drain

GREEDY = {"temperature": 0.0, "max_tokens": 20}


def add(engine: Engine, prompt_len: int, **params: Any) -> str:
    """Add requests whose prompts share no prefix."""
    token = next(
        token
        for token in range(VOCAB)
        if token not in {r.prompt_token_ids[0] for r in engine._requests.values()}
    )
    return engine.add_request([token] * prompt_len, SamplingParams(**GREEDY | params))


def step(engine: Engine) -> list[tuple[int, int, int]]:
    """Run a step; returns (request, scheduled tokens, draft budget) of each sequence."""
    scheduler, found = engine._scheduler, list[list[tuple[int, int, int]]]()
    grant = scheduler.grant_draft_budgets

    def spy(output: SchedulerOutput, wanted: dict[ScheduledSequence, int]) -> list[Copy]:
        copies = grant(output, wanted)
        found.append(
            [
                (item.seq.seq_id[0], item.num_scheduled, item.draft_budget)
                for item in output.scheduled
            ]
        )
        return copies

    scheduler.grant_draft_budgets = spy  # type: ignore[method-assign]
    engine.step()
    scheduler.grant_draft_budgets = grant  # type: ignore[method-assign]
    return found[0]


def test_decoding_comes_before_prompt_chunks() -> None:
    engine = toy_engine(max_num_batched_tokens=8)
    for _ in range(3):
        add(engine, 1)
    add(engine, 12)
    assert step(engine) == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 5, 0)]
    assert step(engine) == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 5, 0)]
    assert step(engine) == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 2, 0)]


def test_prompt_chunks_are_small_in_a_decoding_step() -> None:
    engine = toy_engine(chunked_prefill_size=2)
    add(engine, 12)
    assert step(engine) == [(0, 12, 0)]  # none decodes
    add(engine, 12)
    add(engine, 12)
    assert step(engine) == [(0, 1, 0), (1, 3, 0)]  # two, and one for each that decodes
    assert [seq.seq_id[0] for seq in engine._scheduler.waiting] == [2]
    engine.add_request(
        [9], SamplingParams(n=5, seed=1, max_tokens=20), options=RequestOptions(priority=-1)
    )
    assert step(engine) == [(3, 1, 0), (0, 1, 0), (1, 4, 0)]  # the more urgent one is first
    assert step(engine) == [*[(3, 1, 0)] * 5, (0, 1, 0), (1, 5, 0), (2, 3, 0)]
    assert step(engine) == [*[(3, 1, 0)] * 5, (0, 1, 0), (1, 1, 0), (2, 9, 0)]  # seven decode


def test_prompt_chunks_shrink_with_the_context() -> None:
    engine = toy_engine(chunked_prefill_size=7, attention_crossover=4)
    add(engine, 1)
    step(engine)
    add(engine, 16)
    assert [step(engine)[1] for _ in range(5)] == [
        (1, 8, 0),
        (1, 2, 0),
        (1, 2, 0),
        (1, 2, 0),
        (1, 1, 0),
    ]


def test_a_second_prompt_gets_the_rest_of_the_rows() -> None:
    """Three rows at the start of a context cost as much as one row at depth 8."""
    engine = toy_engine(chunked_prefill_size=2, attention_crossover=4)
    for prompt_len in (1, 12, 20):
        step(engine) if prompt_len == 12 else None
        add(engine, prompt_len)
    both = [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
    assert [step(engine) for _ in range(12)] == [
        [(0, 1, 0), (1, 3, 0)],
        *[both] * 5,
        *[both[:2]] * 3,
        *[both] * 3,
    ]


def test_the_first_sequence_has_a_row_in_every_step() -> None:
    engine = toy_engine(max_num_batched_tokens=3, max_logit_rows=1)
    add(engine, 9, prompt_logprobs=0)  # one row a step
    add(engine, 1, n=5)
    assert step(engine) == [(0, 1, 0), (1, 1, 0)]
    for _ in range(4):  # five sequences decode now, and the budget is three
        assert step(engine) == [(0, 1, 0), (1, 1, 0), (1, 1, 0)]


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    engine = toy_engine(max_num_batched_tokens=8, num_blocks=8, max_num_seqs=2)
    for prompt_len in (5, 30, 1):
        add(engine, prompt_len, max_tokens=2)
    for _ in range(2):  # the second needs all blocks
        assert [item[0] for item in step(engine)] == [0, 2]
    assert [item[0] for item in step(engine)] == [1]


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    """Seven tokens and the next need two blocks. Eight sequences with 22 common tokens need six,
    and one more for each but one.
    """
    for needed, prompt_len, n in ((2, 7, 1), (13, 22, 8)):
        for spare, starts in ((1, True), (0, False)):
            engine = toy_engine(num_blocks=1 + needed + spare, block_size=4)
            add(engine, 1, max_tokens=4)
            step(engine)
            add(engine, prompt_len, n=n, temperature=1.0, seed=1, max_tokens=2)
            assert [item[0] for item in step(engine)] == [0] + [1] * starts


def test_preemption_takes_the_last_and_admits_it_next() -> None:
    engine = toy_engine(num_blocks=7, block_size=4)
    for prompt_len in (8, 8, 1):
        add(engine, prompt_len, max_tokens=12)
    seen = [[item[0] for item in step(engine)] for _ in range(6)]
    assert seen == [[0, 1]] * 5 + [[0, 2]]  # both need a fourth block
    assert engine.stats().preemptions == 1
    assert [seq.seq_id[0] for seq in engine._scheduler.waiting] == [1]
    while engine.has_work:
        engine.step()
    assert engine.stats().preemptions == 1  # it came back only when it could stay


def test_preemption_prefers_sequences_that_have_sampled() -> None:
    """The prompt has 6 of 11 blocks. In step 7 each other sequence needs a third block, and one is
    free.
    """
    engine = toy_engine(
        num_blocks=11, block_size=4, max_num_batched_tokens=8, chunked_prefill_size=1
    )
    for prompt_len in (3, 3, 24):
        add(engine, prompt_len)
    seen = [[item[:2] for item in step(engine)] for _ in range(7)]
    assert seen == [[(0, 3), (1, 3), (2, 2)], *[[(0, 1), (1, 1), (2, 3)]] * 5, [(0, 1), (2, 3)]]
    assert [seq.seq_id[0] for seq in engine._scheduler.waiting] == [1]


def test_the_first_sequence_is_never_preempted() -> None:
    """The prompt has 7 of 10 blocks. In step 11 the first sequence needs a fourth, and no other has
    sampled.
    """
    engine = toy_engine(
        num_blocks=10, block_size=4, max_num_batched_tokens=8, chunked_prefill_size=1
    )
    for prompt_len in (3, 28):
        add(engine, prompt_len)
    seen = [[item[:2] for item in step(engine)] for _ in range(11)]
    assert seen == [[(0, 3), (1, 5)], *[[(0, 1), (1, 2)]] * 9, [(0, 1)]]
    assert [seq.seq_id[0] for seq in engine._scheduler.waiting] == [1]


def test_the_first_prompt_preempts_the_last() -> None:
    """Two prompts have 6 and 5 of 16 blocks. In step 21 the first sequence needs a sixth."""
    engine = toy_engine(num_blocks=16, chunked_prefill_size=2, attention_crossover=4)
    add(engine, 1, max_tokens=30)
    step(engine)
    add(engine, 24)
    add(engine, 20)
    for _ in range(19):
        assert len(step(engine)) in (2, 3) and engine.stats().preemptions == 0
    step(engine)
    assert [seq.seq_id[0] for seq in engine._scheduler.waiting] == [2]


def test_prompts_longer_than_their_windows_run_together() -> None:
    """Each prompt needs four of 25 blocks at once, for a step of eight rows and the three tokens
    before it.
    """
    engine = toy_engine(
        num_blocks=10, block_size=4, windows=(4,), max_num_batched_tokens=8, max_model_len=200
    )
    for _ in range(2):
        add(engine, 100, max_tokens=9)
    seen = [step(engine) for _ in range(14)]
    assert seen[0] == [(0, 8, 0)] and [part[0] for part in seen[13]] == [0, 1]
    most = 0
    while engine.has_work:
        most = max(most, engine.stats().blocks_used)
        step(engine)
    assert engine.stats().preemptions == 0 and most <= 2 * 4


def test_siblings_without_window_blocks_are_preempted_at_once() -> None:
    engine = toy_engine(
        num_blocks=10, block_size=4, windows=(12,), max_num_batched_tokens=8, max_model_len=60
    )
    add(engine, 30, n=4, seed=1, temperature=1.0)
    for _ in range(4):
        step(engine)
    assert (
        len(engine._scheduler.running) == 4 and engine._kv.is_overcommitted
    )  # each has the blocks in front of the window
    step(engine)
    assert (
        len(engine._scheduler.running) == engine.stats().preemptions == 2
        and not engine._kv.is_overcommitted
    )
    (result,) = [update.result for update in drain(engine) if update.result]
    for output in result.outputs:
        known = plain_decoding(
            [0] * 30, SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=20), output.index, 60
        )
        assert output.token_ids == known[30:]


def test_drafts_take_only_free_blocks() -> None:
    engine = toy_engine(num_blocks=5, block_size=4, proposer=RandomTrees(0, VOCAB, {}, max_nodes=8))
    add(engine, 5, max_tokens=10)
    add(engine, 4, max_tokens=10)
    assert step(engine) == [(0, 5, 8), (1, 4, 0)]
    assert engine.stats().preemptions == 0
    engine = toy_engine(num_blocks=6, block_size=4, proposer=RandomTrees(0, VOCAB, {}, max_nodes=8))
    add(engine, 5, max_tokens=10)
    add(engine, 4, max_tokens=10)
    assert step(engine) == [(0, 5, 8), (1, 4, 4)]


def test_drafts_share_rows_and_stop_at_the_end() -> None:
    proposer = RandomTrees(0, VOCAB, {}, max_nodes=8)
    engine = toy_engine(max_num_batched_tokens=10, proposer=proposer)
    add(engine, 1)
    add(engine, 1, max_tokens=3)
    add(engine, 1, n=2)
    assert step(engine) == [
        (0, 1, 5),
        (1, 1, 2),
        (2, 1, 0),
    ]  # the first gets the unused share of the second
    engine = toy_engine(max_logit_rows=3, proposer=proposer)
    add(engine, 1)
    assert step(engine) == [(0, 1, 3)]


def test_draft_budgets_are_shared_by_request() -> None:
    engine = toy_engine(max_num_batched_tokens=12)
    for _ in range(4):
        add(engine, 1)
    output = engine._scheduler.schedule()
    items = output.scheduled
    engine._scheduler.grant_draft_budgets(output, {items[0]: 6, items[2]: 1, items[3]: 3})
    assert [item.draft_budget for item in items] == [4, 0, 1, 3]
    output = engine._scheduler.schedule()._replace(rest=RowBudget(0, 0, 9, 1.0))
    engine._scheduler.grant_draft_budgets(output, dict.fromkeys(output.scheduled, 3))
    assert [item.draft_budget for item in output.scheduled] == [0] * 4


def test_prompt_logprobs_are_computed_in_chunks() -> None:
    engine = toy_engine(max_logit_rows=4)
    add(engine, 10, prompt_logprobs=0)
    add(engine, 3)
    assert step(engine) == [(0, 4, 0), (1, 3, 0)]
    assert step(engine) == [(0, 4, 0), (1, 1, 0)]
    assert step(engine) == [(0, 2, 0), (1, 1, 0)]
    engine = toy_engine(max_logit_rows=4)
    add(engine, 3, prompt_logprobs=0)
    add(engine, 10, prompt_logprobs=0)
    assert step(engine) == [
        (0, 3, 0),
        (1, 2, 0),
    ]  # the first has logits of two rows, and one to draw from


def test_more_sequences_than_max_num_seqs() -> None:
    engine = toy_engine(max_num_seqs=2)
    request_id = add(engine, 3, n=5, max_tokens=3, temperature=1.0, seed=1)
    for _ in range(2):
        step(engine)
    assert [
        [seq.seq_id[1] for seq in queue]
        for queue in (engine._scheduler.running, engine._scheduler.waiting)
    ] == [[0, 1], [2, 3, 4]]
    results = []
    while engine.has_work:
        assert len(step(engine)) <= 2
        results = [b.output.token_ids for r in engine._requests.values() for b in r.seqs] or results
    roomy = toy_engine()
    add(roomy, 3, n=5, max_tokens=3, temperature=1.0, seed=1)
    (result,) = [update.result for _ in range(3) for update in roomy.step() if update.result]
    assert request_id == "0" and [output.token_ids for output in result.outputs] == results


def test_siblings_share_the_prompt() -> None:
    engine = toy_engine(num_blocks=40, block_size=4)
    add(engine, 22, n=8, max_tokens=3)
    step(engine)
    assert engine.stats().blocks_total - engine.stats().blocks_free == 6
    step(engine)
    assert engine.stats().blocks_total - engine.stats().blocks_free == 5 + 8
