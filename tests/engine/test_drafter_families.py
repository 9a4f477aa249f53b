"""Promise 1 for each kind of drafter over several families, with all options at once: int8 KV in
few blocks, prefix hits, a grammar, adapters, greedy and sampled requests in one batch.
"""

from collections.abc import Sequence
from functools import cache

import pytest

from headrace.engine.engine import Engine
from headrace.model.spec import ModelSpec
from headrace.outputs import RequestOutput, Update
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.draft_engines import draft_engine
from tests.drafters import DRAFTERS
from tests.engine.test_adapters import adapter_of
from tests.engine.test_promise import same
from tests.families import spec_of
from tests.tiny import Tensors, drain, random_tensors, tiny_engine

FAMILIES = ("llama-biases", "qwen2-window", "gemma3", "mixtral", "deepseek-v3", "gpt2")
KINDS = (*DRAFTERS, "Medusa")
SHARED = [token % 61 for token in range(40)]
GRAMMAR = StructuredOutputs(regex="([b-t]|a[^a])*")
REQUESTS: list[tuple[list[int], SamplingParams, str | None]] = [
    (SHARED, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), None),
    ([*SHARED[:35], 3], SamplingParams(seed=2, max_tokens=30, logprobs=1, ignore_eos=True), None),
    ([4, 5] * 10, SamplingParams(seed=3, max_tokens=24, structured_outputs=GRAMMAR), "0"),
    ([7, 8, 9, 7] * 5, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), "1"),
    ([2], SamplingParams(n=2, seed=4, max_tokens=20, top_p=0.9, ignore_eos=True), None),
]


@cache
def model(name: str) -> tuple[ModelSpec, Tensors]:
    spec = spec_of(name)
    return spec, random_tensors(spec, 1)


def with_adapters(engine: Engine, spec: ModelSpec) -> Engine:
    for number in (0, 1):
        engine.load_adapter(str(number), adapter_of(spec, number))
    return engine


def results_of(engine: Engine, which: Sequence[int]) -> list[RequestOutput]:
    """The results of some requests. The last one is urgent, and comes after some steps."""
    ids, updates = [], list[Update]()
    for i in which:
        prompt, params, adapter = REQUESTS[i]
        is_last = i == which[-1]
        options = RequestOptions(adapter=adapter, priority=-1 if is_last else 0)
        for _ in range(9 if is_last and len(which) > 1 else 0):
            updates += engine.step()
        ids.append(engine.add_request(prompt, params, options))
    updates += drain(engine)
    results = {update.request_id: update.result for update in updates if update.result}
    return [results[request_id] for request_id in ids]


@cache
def alone(name: str) -> list[RequestOutput]:
    engine = tiny_engine(model(name), "cpu", kv_dtype="int8", prefix_cache=False, slots=800)
    with_adapters(engine, model(name)[0])
    return [results_of(engine, [i])[0] for i in range(len(REQUESTS))]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafters_change_no_token_of_a_family(name: str, kind: str) -> None:
    how = {"how": "draft_model", "drafter": DRAFTERS[kind](model(name))} if kind in DRAFTERS else {}
    order = [1, 2, 3, 4, 0]
    for slots in (128, 800):
        engine, _ = draft_engine(
            model(name), **{"how": "medusa", **how}, width=2, depth=3, kv_dtype="int8", slots=slots
        )
        with_adapters(engine, model(name)[0])
        for _ in range(2):
            for i, result in zip(order, results_of(engine, order), strict=True):
                same(result, alone(name)[i], exact=True)
        stats = engine.stats()
        assert stats.drafted > 0 and stats.proposer_failures == 0
        assert stats.blocks_free == stats.blocks_total
        assert stats.preemptions > 0 if slots == 128 else stats.cached_tokens > 0
