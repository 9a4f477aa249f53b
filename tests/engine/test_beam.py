"""Beam search in the engine: the results equal a naive search, with any batch, preemption
or draft.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.acceptors.beam import BeamSearch
from headrace.backend import forward
from headrace.config import KvConfig
from headrace.engine.engine import Engine
from headrace.errors import NonFiniteLogitsError, RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.suffix import SuffixProposer
from headrace.structured_outputs import StructuredOutputs
from tests.acceptors.beam_twin import Beam, beam_search
from tests.backend.batches import Sequence, batch_of
from tests.engine.toy import VOCAB, plain_decoding, toy_engine, toy_logits
from tests.tiny import TinyVocabulary, drain, run_all, tiny_engine, tiny_executable, tiny_model

MAX_MODEL_LEN = 40
PROMPTS = [[1, 2, 3], [4], [5, 4, 3, 2, 1, 6, 7], list(range(20))]
PLAIN = SamplingParams(seed=1, max_tokens=12)
VOCABULARY = TinyVocabulary(VOCAB)


@st.composite
def beams(draw: st.DrawFn) -> SamplingParams:
    width = draw(st.sampled_from([1, 2, 3, 5]))
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0])),
        early_stopping=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
        stop=draw(st.sampled_from([None, ["c"], ["ab", "b"], ["dq", "e", "f", "g", "h"]])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=draw(st.sampled_from([None, {3: 2.0, 4: -100.0}])),
    )


def toy_search(prompt: list[int], params: SamplingParams) -> list[Beam]:
    return beam_search(prompt, params, toy_logits, VOCAB, MAX_MODEL_LEN, decode=VOCABULARY.decode)


def agree(result: RequestOutput, expected: list[Beam], params: SamplingParams) -> None:
    assert [output.token_ids for output in result.outputs] == [beam.tokens for beam in expected]
    assert [output.cumulative_logprob for output in result.outputs] == pytest.approx(
        [beam.total for beam in expected], abs=1e-4
    )
    assert [output.index for output in result.outputs] == list(range(len(expected)))
    for output in result.outputs:
        assert output.finish_reason in ("stop", "length")
        assert (
            output.logprobs is None or [*map(next, map(iter, output.logprobs))] == output.token_ids
        )
        if output.finish_reason == "length" and params.min_tokens == 0:
            assert output.text == VOCABULARY.decode(output.token_ids)


def blocks_alone(prompt_len: int, params: SamplingParams, block_size: int) -> int:
    """Blocks of a request that runs alone: the full blocks of its prompt once, the others for each
    beam.
    """
    shared = prompt_len // block_size
    return shared + (params.beam_width or 1) * (
        -(-(prompt_len + (params.max_tokens or 0) - 1) // block_size) - shared
    )


def assert_all_free(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.blocks_free, stats.running, stats.waiting) == (stats.blocks_total, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.one_of(beams(), st.just(PLAIN))),
        min_size=1,
        max_size=5,
    ),
    num_blocks=st.sampled_from([0, 4, 60]),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.sampled_from([5, 6, 20]),
    max_num_batched_tokens=st.sampled_from([5, 7, 64]),
    max_logit_rows=st.sampled_from([1, 64]),
    stagger=st.integers(0, 3),
)
def test_beam_search_matches_a_naive_search(
    requests: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    block_size: int,
    stagger: int,
    **config: int,
) -> None:
    """The pool has `num_blocks` more than the largest request needs."""
    needed = [blocks_alone(len(prompt), params, block_size) for prompt, params in requests]
    engine = toy_engine(
        num_blocks=max(needed) + num_blocks,
        block_size=block_size,
        proposer=SuffixProposer(16),
        **config,
    )
    ids, updates = [], []
    for prompt, params in requests:
        ids.append(engine.add_request(prompt, params))
        for _ in range(stagger):
            updates += engine.step()
    updates += drain(engine)
    for request_id, (prompt, params) in zip(ids, requests, strict=True):
        mine = [update for update in updates if update.request_id == request_id]
        result = mine[-1].result
        assert result is not None and result.error is None
        if params.beam_width is None:
            assert [prompt + output.token_ids for output in result.outputs] == [
                plain_decoding(prompt, params, 0)
            ]
            continue
        agree(result, toy_search(prompt, params), params)
        assert [(u.index, u.text, u.token_ids, u.finish_reason) for u in mine] == [
            (o.index, o.text, o.token_ids, o.finish_reason) for o in result.outputs
        ]
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("params", "needs_logits"),
    [
        ({}, False),
        ({"stop": ["c"]}, True),
        ({"logprobs": 0}, True),
        ({"bad_words": ["ab"]}, True),
        ({"structured_outputs": StructuredOutputs(regex="a*")}, True),
    ],
)
def test_beam_search_follows_its_sampling_parameters(
    params: dict[str, Any], needs_logits: bool
) -> None:
    asked = SamplingParams(
        beam_width=3,
        n=2,
        length_penalty=0.5,
        early_stopping=True,
        stop_token_ids=[5, 6, 7, 8],
        ignore_eos=True,
        max_tokens=4,
        **params,
    )
    search = toy_engine()._acceptor(asked)
    assert isinstance(search, BeamSearch)
    assert (search.width, search.num_results, search.length_penalty, search.early_stopping) == (
        3,
        2,
        0.5,
        True,
    )
    assert (search.end_ids, search.has_stops) == ([5, 6, 7, 8], "stop" in params)
    assert search.needs_logits == needs_logits


@cache
def tiny_logits(seed: int, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits after these tokens, computed without a KV cache."""
    executable = tiny_executable(tiny_model(seed), "reference", KvConfig((4,), 32, "f32"))
    return forward(
        executable, batch_of([Sequence([0, 1, 2, 3], 32)], [list(tokens)], [([], [])], False)
    ).logits[-1]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beam_search_on_a_model(backend: str, length_penalty: float, early_stopping: bool) -> None:
    prompt, eos = [7, 8, 9], (60, 3, 17)
    params = SamplingParams(
        beam_width=3,
        n=3,
        max_tokens=7,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        logprobs=1,
    )
    expected = beam_search(
        prompt, params, lambda tokens: tiny_logits(0, tuple(tokens)), 61, 128, frozenset(eos)
    )
    engine = tiny_engine(tiny_model(0), backend, eos_ids=eos, kv_dtype="f32", threads=2)
    (result,) = run_all(engine, [(prompt, params)])
    assert [output.token_ids for output in result.outputs] == [beam.tokens for beam in expected]
    assert [output.cumulative_logprob for output in result.outputs] == pytest.approx(
        [beam.total for beam in expected], abs=1e-2
    )
    for output in result.outputs:
        recorded = [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)
        ]
        assert sum(recorded) == pytest.approx(output.cumulative_logprob, abs=1e-5)


def test_beams_share_the_prompt() -> None:
    """22 prompt tokens fill five blocks. Each beam needs a copy of the sixth, which is part
    full.
    """
    engine = toy_engine(num_blocks=40, block_size=4)
    engine.add_request([1] * 22, SamplingParams(beam_width=6, max_tokens=12))
    used = []
    while engine.has_work:
        engine.step()
        used.append(engine.stats().blocks_total - engine.stats().blocks_free)
    assert used[0] == 6
    assert max(used) <= 5 + 6 * (9 - 5)
    assert used[1] <= 5 + 6


def test_beams_are_preempted_and_share_the_prompt_again() -> None:
    params = SamplingParams(beam_width=4, n=4, max_tokens=14)
    requests = [([i, 2, 3, 4, 5, 6, 7, 8, 9], params) for i in range(3)]
    engine = toy_engine(num_blocks=2 + 4 * (6 - 2), block_size=4)  # enough for one request alone
    for result, (prompt, _) in zip(run_all(engine, requests), requests, strict=True):
        agree(result, toy_search(prompt, params), params)
    assert engine.stats().preemptions > 0
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("prompt_len", "params", "message"),
    [
        (3, {"beam_width": 7}, "beam_width 7 exceeds max_num_seqs 6; use fewer beams"),
        (3, {"beam_width": 6}, "beam_width 6 exceeds max_num_batched_tokens 5"),
        (
            9,
            {"beam_width": 5, "max_tokens": 20},
            "20 output tokens in each of 5 beams need up to 27 blocks of 4 tokens, but "
            "the cache has 26",
        ),
    ],
)
def test_beam_searches_that_are_refused(
    prompt_len: int, params: dict[str, Any], message: str
) -> None:
    engine = toy_engine(num_blocks=26, max_num_seqs=6, max_num_batched_tokens=5)
    with pytest.raises(RequestError, match=message):
        engine.add_request([1] * prompt_len, SamplingParams(**params))
    assert not engine.has_work


def test_a_row_that_is_not_finite_fails_the_request_alone() -> None:
    params = SamplingParams(beam_width=3, n=2, max_tokens=12)
    broken = toy_search([4], params)[0].tokens[4]
    engine = toy_engine(broken=broken)
    greedy, prompt = SamplingParams(temperature=0, max_tokens=1), [0 if broken else 1]
    failed, other = run_all(engine, [([4], params), (prompt, greedy)])
    assert isinstance(failed.error, NonFiniteLogitsError)
    assert "error" in {output.finish_reason for output in failed.outputs}
    assert [*prompt, *other.outputs[0].token_ids] == plain_decoding(prompt, greedy, 0)
    assert_all_free(engine)


def test_abort_a_beam_search_in_every_state() -> None:
    params = SamplingParams(beam_width=3, n=3, max_tokens=12, stop_token_ids=[2, 7])
    for steps in range(30):
        engine = toy_engine(num_blocks=18, block_size=3, max_num_batched_tokens=5)
        ids = [engine.add_request([i, 2, 3, 4, 5, 6, 7], params) for i in range(3)]
        for _ in range(steps):
            engine.step()
        for request_id in ids:
            result = engine.abort(request_id)
            if result is not None:
                scores = [
                    (output.cumulative_logprob or 0) / max(1, len(output.token_ids))
                    for output in result.outputs
                ]
                assert result.finished and scores == sorted(scores, reverse=True)
                assert {output.finish_reason for output in result.outputs} <= {"abort", "stop"}
        assert_all_free(engine)


def test_an_aborted_search_returns_the_best_so_far() -> None:
    engine = toy_engine()
    request_id = engine.add_request([4], SamplingParams(beam_width=3, n=2, max_tokens=12))
    for _ in range(4):
        engine.step()
    result = engine.abort(request_id)
    expected = toy_search([4], SamplingParams(beam_width=3, n=2, max_tokens=4))
    assert result is not None and [output.token_ids for output in result.outputs] == [
        beam.tokens for beam in expected
    ]


def test_prompt_logprobs_of_a_beam_search() -> None:
    params = SamplingParams(beam_width=3, max_tokens=5, prompt_logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    searched, drawn = run_all(
        toy_engine(max_logit_rows=2), [([1, 2, 3, 4, 5], params), ([1, 2, 3, 4, 5], plain)]
    )
    assert searched.prompt_logprobs == drawn.prompt_logprobs


def test_drafts_do_not_change_a_beam_search() -> None:
    params = SamplingParams(beam_width=3, max_tokens=12)
    plain = SamplingParams(temperature=0, max_tokens=20)
    engine = toy_engine(proposer=SuffixProposer(16))
    searched, _ = run_all(engine, [([1, 2] * 4, params), ([1, 2] * 4, plain)])
    agree(searched, toy_search([1, 2] * 4, params), params)
    assert engine.stats().drafted > 0
