"""Static batching: whole batches, padding until the longest ends, and the same tokens as in-flight
batching.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.loader.options import engine_config
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.test_scheduler import add, step
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.random_trees import RandomTrees
from tests.tiny import drain, run_all, tiny_engine, tiny_model


def static_engine(**options: Any) -> Engine:
    return toy_engine(batching="static", **options)


def test_finished_sequences_take_rows_as_padding() -> None:
    engine = static_engine(max_num_seqs=3)
    for max_tokens in (1, 4, 2, 1):
        add(engine, 2, max_tokens=max_tokens)
    assert step(engine) == [(0, 2, 0), (1, 2, 0), (2, 2, 0)]
    for _ in range(3):
        assert step(engine) == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
    assert step(engine) == [(3, 2, 0)]
    assert not engine.has_work and engine.stats().blocks_free == engine.stats().blocks_total


def test_no_request_joins_a_running_batch() -> None:
    engine = static_engine(max_num_seqs=8)
    add(engine, 2, max_tokens=3)
    assert step(engine) == [(0, 2, 0)]
    add(engine, 2, max_tokens=3)
    assert [step(engine) for _ in range(3)] == [[(0, 1, 0)], [(0, 1, 0)], [(1, 2, 0)]]


def test_target_token_ms_does_not_delay_a_batch() -> None:
    engine = static_engine(max_num_seqs=8, target_token_ms=1e-6)  # no step is so fast
    for _ in range(3):
        add(engine, 2, max_tokens=3)
    assert [item[0] for item in step(engine)] == [0, 1, 2]


def test_a_batch_larger_than_a_step_starts_in_several() -> None:
    engine = static_engine(max_num_seqs=4, max_num_batched_tokens=5, block_size=1)
    for _ in range(3):
        add(engine, 4, max_tokens=3)
    assert [item[0] for item in step(engine)] == [0, 1]
    assert {item[0] for item in step(engine)} == {0, 1, 2} and engine.stats().blocks_used == 3 * 6
    assert {item[0] for item in step(engine)} == {0, 1, 2}


def test_prompts_of_a_batch_are_not_chunked() -> None:
    engine = static_engine(max_num_seqs=2, max_num_batched_tokens=40)
    for _ in range(2):
        add(engine, 30, max_tokens=2)
    assert [step(engine) for _ in range(2)] == [[(0, 30, 0), (1, 10, 0)], [(0, 1, 0), (1, 20, 0)]]


def test_padding_leaves_a_row_for_other_sequences() -> None:
    engine = static_engine(max_num_seqs=3, max_num_batched_tokens=2)
    add(engine, 1, max_tokens=1, n=2, temperature=1.0, seed=1)
    add(engine, 1, max_tokens=3)
    assert [step(engine) for _ in range(3)] == [
        [(0, 1, 0), (1, 1, 0)]
    ] * 3  # one of the first two is forgotten
    assert not engine.has_work


@pytest.mark.parametrize("reason", ["abort", "timeout", "error"])
def test_aborted_sequences_are_no_padding(reason: str) -> None:
    now = [0.0]
    engine = static_engine(max_num_seqs=3, broken=9, clock=lambda: now[0])
    for first in (1, 9 if reason == "error" else 2, 3):
        engine.add_request(
            [first, first],
            SamplingParams(max_tokens=9, seed=1),
            options=RequestOptions(timeout=5 if first == 2 and reason == "timeout" else None),
        )
    step(engine)
    now[0] = 6.0
    if reason == "abort":
        engine.abort("1")
    assert step(engine) == [(0, 1, 0), (2, 1, 0)]
    assert engine.stats().running == 2


def test_memory_for_the_longest_is_reserved_at_the_start() -> None:
    engine = static_engine(block_size=4, num_blocks=11)
    add(engine, 2, max_tokens=16)  # 17 slots, 5 blocks
    add(engine, 2, max_tokens=1)
    add(engine, 2, max_tokens=1)  # would be the third with 5 blocks
    assert [item[0] for item in step(engine)] == [0, 1]
    stats = engine.stats()
    assert stats.blocks_used == 10 and stats.kv[0].slots_empty == 10 * 4 - 4
    inflight = toy_engine(block_size=4, num_blocks=11)
    add(inflight, 2, max_tokens=15)
    add(inflight, 2, max_tokens=2)
    step(inflight)
    assert inflight.stats().blocks_used == 2 and inflight.stats().kv[0].slots_empty == 4


def test_padding_never_preempts_a_sequence() -> None:
    """Both sequences end with nine tokens, eight of them with KV, and the blocks are just enough.
    The first has no slot for another row.
    """
    engine = static_engine(block_size=4, num_blocks=4)
    add(engine, 6, max_tokens=3)
    add(engine, 2, max_tokens=7)
    seen = [[item[0] for item in step(engine)] for _ in range(7)]
    assert seen == [[0, 1]] * 3 + [[1]] * 4
    assert engine.stats().preemptions == 0 and not engine.has_work


def test_preempted_padding_is_dropped() -> None:
    """Two of three sequences may run; the last ends with its first token."""
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=6)
    drawn = [plain_decoding([0], params, index)[1:] for index in range(3)]
    engine = static_engine(max_num_seqs=2)
    add(engine, 1, n=3, seed=1, temperature=1.0, max_tokens=6, stop_token_ids=[drawn[2][0]])
    (result,) = [update.result for update in drain(engine) if update.result]
    assert [output.token_ids for output in result.outputs] == [*drawn[:2], drawn[2][:1]]
    assert engine.stats().preemptions == 0


def test_padding_ends_when_all_others_are_preempted() -> None:
    """One of two sequences may run; the first ends with its first token, and the other waits."""
    params = SamplingParams(n=2, seed=1, temperature=1.0, max_tokens=3)
    drawn = [plain_decoding([0], params, index)[1:] for index in range(2)]
    assert drawn[0][0] not in drawn[1]
    engine = static_engine(max_num_seqs=1)
    add(engine, 1, n=2, seed=1, temperature=1.0, max_tokens=3, stop_token_ids=[drawn[0][0]])
    (result,) = [update.result for _ in range(8) for update in engine.step() if update.result]
    assert [output.token_ids for output in result.outputs] == [drawn[0][:1], drawn[1]]


def test_padding_does_not_hide_later_sequences() -> None:
    """The second prompt is computed in several steps, while the first sequence is padding."""
    engine = static_engine(max_num_seqs=2, max_num_batched_tokens=4)
    add(engine, 1, max_tokens=1)
    add(engine, 12, max_tokens=1, prompt_logprobs=0)
    results = [update.result for update in drain(engine) if update.result]
    alone = toy_engine()
    alone.add_request([1] * 12, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert [result.prompt_logprobs for result in results[1:]] == [
        update.result.prompt_logprobs for update in drain(alone) if update.result
    ]


def test_padding_ends_with_an_aborted_last_member() -> None:
    engine = static_engine(max_num_seqs=2)
    add(engine, 2, max_tokens=1)
    last = add(engine, 2, max_tokens=9)
    add(engine, 2, max_tokens=1)
    step(engine)
    engine.abort(last)
    assert engine.stats().running == 0 and engine.stats().blocks_free == engine.stats().blocks_total
    assert step(engine) == [(2, 2, 0)]


def test_padding_ends_with_a_beam_search() -> None:
    engine = static_engine(max_num_seqs=3)
    add(engine, 2, max_tokens=1)
    add(engine, 2, max_tokens=5, beam_width=2, temperature=1.0)
    add(engine, 2, max_tokens=1)
    results = [update.result for _ in range(20) for update in engine.step() if update.result]
    assert len(results) == 3 and not engine.has_work and not any(result.error for result in results)
    assert engine.stats().running == 0 and engine.stats().blocks_free == engine.stats().blocks_total


def test_padding_ends_when_the_live_sequences_are_preempted() -> None:
    engine = static_engine(num_blocks=24, max_num_seqs=1)
    params = SamplingParams(n=4, seed=8, max_tokens=2, stop_token_ids=range(0, VOCAB, 3))
    engine.add_request([8, 15, 5, 14, 16, 1, 8, 16], params)
    first = {update.index: update.finish_reason for update in engine.step()}
    assert first == {0: "stop", 1: None, 2: "stop", 3: None}
    (result,) = (update.result for _ in range(20) for update in engine.step() if update.result)
    assert [len(output.token_ids) for output in result.outputs] == [
        1,
        2,
        1,
        2,
    ] and not engine.has_work


def test_padding_leaves_rows_for_beams() -> None:
    short, search = (
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, max_tokens=6),
    )
    requests = [([5, 6], short), ([7], short), ([1, 2, 3, 4], search)]
    plain = run_all(static_engine(max_num_seqs=8), requests)
    narrow = run_all(static_engine(max_num_seqs=8, max_num_batched_tokens=3), requests)
    assert [result.outputs for result in narrow] == [result.outputs for result in plain]


def test_drafts_write_to_no_block_that_siblings_share() -> None:
    """The blocks do not suffice for the longest of three at once, so a fork shares some reserved
    blocks.
    """
    engine = static_engine(
        num_blocks=14, block_size=2, proposer=RandomTrees(1, VOCAB, {}, max_nodes=3)
    )
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=15)
    (result,) = run_all(engine, [([1, 1], params)])
    assert [[1, 1, *output.token_ids] for output in result.outputs] == [
        plain_decoding([1, 1], params, index) for index in range(3)
    ]


REQUEST = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([1, 1, 2, 4]),
    st.integers(0, 99),
    st.sampled_from([(), tuple(range(0, VOCAB, 3))]),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=7),
    num_running=st.integers(1, 5),
    rows=st.integers(1, 20),
    drafts=st.booleans(),
    windows=st.sampled_from([(0,), (0, 5)]),
)
def test_tokens_are_those_of_plain_decoding(
    requests: list[Any], num_running: int, rows: int, drafts: bool, windows: tuple[int, ...]
) -> None:
    proposer = RandomTrees(0, VOCAB, {}, max_nodes=5) if drafts else None
    engine = static_engine(
        num_blocks=24,
        max_num_seqs=num_running,
        max_num_batched_tokens=rows,
        proposer=proposer,
        windows=windows,
    )
    asked = [
        (prompt, SamplingParams(n=n, seed=seed, max_tokens=tokens, stop_token_ids=list(stops)))
        for prompt, tokens, n, seed, stops in requests
    ]
    for (prompt, params), result in zip(asked, run_all(engine, asked), strict=True):
        for output in result.outputs:
            whole = plain_decoding(prompt, params, output.index)[len(prompt) :]
            length = next(
                (i for i, token in enumerate(whole, 1) if token in (params.stop_token_ids or ())),
                len(whole),
            )
            assert output.token_ids == whole[:length]
    engine._kv.check([])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_same_tokens_and_logprobs_as_in_flight(backend: str) -> None:
    model = tiny_model(7)
    asked = [
        ([1 + i, 2, 3] * (1 + i % 3), SamplingParams(max_tokens=3 + 5 * i % 17, seed=i, logprobs=1))
        for i in range(7)
    ]
    outputs = []
    for batching in ("inflight", "static"):
        engine = tiny_engine(model, backend, slots=512, batching=batching, max_num_seqs=3)
        results = run_all(engine, asked)
        outputs.append(
            [(o.token_ids, o.logprobs, o.text, o.finish_reason) for r in results for o in r.outputs]
        )
        engine.close()
    assert outputs[0] == outputs[1]


def test_the_name_of_batching_is_checked() -> None:
    with pytest.raises(
        RequestError, match="batching must be one of inflight, static, not 'dynamic'"
    ):
        engine_config({"batching": "dynamic"})


def test_drafts_of_a_sequence_leave_blocks_for_copies_of_another() -> None:
    """Seven blocks are too few for four sequences. In the fourth step two share their second block,
    and none is free. The third has a block of its own, and gets both rows.
    """
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=13)
    known = {(0, i): plain_decoding([1], params, i) for i in range(4)}
    proposer = RandomTrees(1, VOCAB, known, max_nodes=2, right=0.9)
    engine = static_engine(num_blocks=7, block_size=4, proposer=proposer, max_num_batched_tokens=6)
    engine.add_request([1], params)
    assert [step(engine) for _ in range(4)][-1] == [(0, 1, 0), (0, 1, 0), (0, 1, 2)]
