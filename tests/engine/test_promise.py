"""Promise 1: the same request gives the same tokens, whatever is in the batch, however it is cut, and whoever drafts.

`cpu` must be equal to the bit, log-probabilities included; `reference` computes in float64, in an order that depends on the
batch, so its log-probabilities may differ in the last place.
"""

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import KvDtype
from headrace.engine.engine import Engine
from headrace.model.spec import ModelSpec
from headrace.propose import NEEDS, PROPOSERS
from headrace.request import Logprobs, RequestOutput, SamplingParams
from tests.random_trees import RandomTrees
from tests.tiny import Tensors, drain, run_all, tiny_engine, tiny_model

BACKENDS = ["cpu", "reference"]
VOCAB = 61
EOS = (60,)

MODELS: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": 1, "window": 6, "kv_heads": 4, "layers": 3},
    {"seed": 2, "kv_heads": 1, "format": "Q8_0"},
]

REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([7, 8, 9, 7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=14, logprobs=3)),
    ([3], SamplingParams(seed=1, max_tokens=11, logprobs=0)),
    (list(range(1, 38)), SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1)),
    ([5, 4, 3, 2], SamplingParams(n=4, seed=2, max_tokens=9, logprobs=1, top_p=0.9)),
    ([9, 9, 9, 9, 9], SamplingParams(seed=3, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)),
    ([1, 2], SamplingParams(temperature=0.6, seed=4, top_k=20, min_p=0.02, max_tokens=13, logit_bias={4: 3.0, 5: -100.0})),
    ([20, 21, 22], SamplingParams(temperature=0, max_tokens=15, presence_penalty=2.0, stop=["a"], min_tokens=3, ignore_eos=True)),
    ([2, 4] * 7, SamplingParams(n=2, seed=5, temperature=0.5, max_tokens=10, prompt_logprobs=0, stop_token_ids=[6, 7], min_tokens=2)),
]


@cache
def model(which: int) -> tuple[ModelSpec, Tensors]:
    return tiny_model(**MODELS[which])


@cache
def alone(backend: str, which: int, kv_dtype: str) -> list[RequestOutput]:
    """Every request by itself, in one piece, without drafts."""
    engine = tiny_engine(model(which), backend, eos_ids=EOS, kv_dtype=kv_dtype, prefix_cache=False, release_outside_window=False)
    return [run_all(engine, [request])[0] for request in REQUESTS]


def truth(results: list[RequestOutput], order: list[int]) -> dict[tuple[int, int], list[int]]:
    """The sequence of each sequence when the requests are added in this order."""
    return {
        (number, output.index): results[which].prompt_token_ids + output.token_ids
        for number, which in enumerate(order)
        for output in results[which].outputs
    }


def same(a: RequestOutput, b: RequestOutput, exact: bool) -> None:
    for one, other in zip(a.outputs, b.outputs, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        same_logprobs(one.logprobs or [], other.logprobs or [], exact)
    same_logprobs(a.prompt_logprobs or [], b.prompt_logprobs or [], exact)


def same_logprobs(a: list[Logprobs] | list[Logprobs | None], b: list[Logprobs] | list[Logprobs | None], exact: bool) -> None:
    for one, other in zip(a, b, strict=True):
        if exact or one is None or other is None:
            assert one == other
        else:
            assert list(one) == list(other)
            assert [v.logprob for v in one.values()] == pytest.approx([v.logprob for v in other.values()], abs=1e-5)


LOADS: dict[str, st.SearchStrategy[Any]] = {
    "which": st.integers(0, len(MODELS) - 1),
    "order": st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=12),
    "stagger": st.integers(0, 3),
    "kv_dtype": st.sampled_from(get_args(KvDtype)),
    "max_num_batched_tokens": st.sampled_from([1, 2, 3, 5, 8, 17, 64]),
    "max_num_seqs": st.sampled_from([1, 2, 5, 32]),
    "max_logit_rows": st.sampled_from([1, 4, 64]),
    "chunked_prefill_size": st.sampled_from([1, 3, 32]),
    "multi_step_ms": st.sampled_from([0, 1e6]),
    "slots": st.sampled_from([42, 56, 80, 800]),
    "threads": st.integers(1, 2),
    "prefix_cache": st.booleans(),
    "late": st.booleans(),
}
"""Which requests come to which model, how fast, and what the engine makes of them."""


def keeps_the_promise(engine: Engine, order: list[int], stagger: int, expected: list[RequestOutput], exact: bool) -> None:
    """Serve the requests, `stagger` steps between two of them, and compare what they say at the end and on the way."""
    updates, ids = [], []
    for request in order:
        ids.append(engine.add_request(*REQUESTS[request]))
        for _ in range(stagger):
            updates += engine.step()
    updates += drain(engine)
    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, request in zip(ids, order, strict=True):
        result = results[request_id]
        same(result, expected[request], exact)
        for output in result.outputs:
            mine = [u for u in updates if (u.request_id, u.index) == (request_id, output.index)]
            assert "".join(update.text for update in mine) == output.text
            assert [token for update in mine for token in update.token_ids] == output.token_ids
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.proposer_failures == 0


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    drafts=st.sampled_from([*(name for name in PROPOSERS if name not in NEEDS), "trees", "wide trees"]),
    seed=st.integers(0, 1000),
    **LOADS,
)
def test_same_request_same_tokens(
    backend: str, which: int, order: list[int], kv_dtype: str, drafts: str, seed: int, stagger: int, **config: Any
) -> None:
    expected = alone(backend, which, kv_dtype)
    nodes = {"trees": 9, "wide trees": 70}.get(drafts)
    proposer = RandomTrees(seed, VOCAB, truth(expected, order), nodes) if nodes else drafts
    engine = tiny_engine(model(which), backend, proposer=proposer, eos_ids=EOS, kv_dtype=kv_dtype, **config)
    keeps_the_promise(engine, order, stagger, expected, exact=backend == "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_window_reaches_is_let_go(backend: str) -> None:
    """A long output holds no more blocks than its window, and so finds room beside others."""
    made = tiny_model(3, window=40)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, logprobs=1, ignore_eos=True)
    results = []
    for release_outside_window in (True, False):
        engine = tiny_engine(made, backend, kv_dtype="f32", release_outside_window=release_outside_window, slots=512)
        engine.add_request([1, 2, 3, 4, 5], params)
        updates, most = [], 0
        while engine.has_work:
            updates += engine.step()
            most = max(most, engine.stats().blocks_total - engine.stats().blocks_free)
        size = engine.limits.kv.block_size
        assert most == -(-104 // size) if not release_outside_window else most <= -(-40 // size) + 1
        results.append(updates[-1].result)
    assert results[0] and results[1]
    same(results[0], results[1], exact=backend == "cpu")
    model = tiny_model(3)[0]
    assert replace(model, windows=(0, 6)).widest_window == 0 and replace(model, windows=(6, 9)).widest_window == 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_right_drafts_save_steps(backend: str) -> None:
    expected = alone(backend, 0, "f32")
    proposer = RandomTrees(0, VOCAB, truth(expected, [0]), right=1.0)
    engine = tiny_engine(model(0), backend, proposer=proposer, eos_ids=EOS, kv_dtype="f32")
    same(run_all(engine, REQUESTS[:1])[0], expected[0], exact=backend == "cpu")
    stats = engine.stats()
    assert stats.accepted >= 6
    assert stats.steps == len(expected[0].outputs[0].token_ids) - stats.accepted


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_happens_and_is_not_seen(backend: str) -> None:
    expected = alone(backend, 0, "f32")
    engine = tiny_engine(model(0), backend, slots=42, eos_ids=EOS, kv_dtype="f32")  # what the longest request needs alone
    for i, result in enumerate(run_all(engine, REQUESTS * 3)):
        same(result, expected[i % len(REQUESTS)], exact=backend == "cpu")
    assert engine.stats().preemptions > 0
