"""A request of any kind that gives way to an urgent one gets the bits that it gets alone."""

from functools import cache
from itertools import count
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.outputs import RequestOutput
from headrace.program.adapter import Adapter
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams, ThinkingBudget
from headrace.structured_outputs import StructuredOutputs
from tests.draft_engines import draft_engine
from tests.drafters import random_drafter
from tests.engine.test_adapters import adapter as adapter_of
from tests.engine.test_promise import same
from tests.engine.test_structured import CHOICE, GRAMMAR, REGEX, SCHEMA
from tests.json_vocabulary import VOCAB, JsonVocabulary
from tests.tiny import drain, tiny_engine, tiny_model

PLACES = 4
STEPS = (1, 4)
"""Steps of a request before the urgent one comes."""
LONG = {"max_tokens": 40, "ignore_eos": True}
SHARED = [7, 8, 9, 4] * 9
"""A prompt of more than one block, so that a second one has cached tokens."""


def asking(**asked: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputs(**asked)}


KINDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([7, 8, 9, 7, 8, 9], {"temperature": 0, "logprobs": 3, **LONG}),
    "sampled": ([3], {"top_p": 0.9, "min_p": 0.01, "logprobs": 1, **LONG}),
    "penalties": ([5, 6] * 4, {"repetition_penalty": 1.3, "frequency_penalty": 0.4, **LONG}),
    "n of 4": (SHARED, {"n": 4, "logprobs": 0, **LONG}),
    "beams": ([1, 2], {"beam_width": 3, "n": 3, "max_tokens": 30}),
    "prompt_logprobs": (SHARED, {"prompt_logprobs": 2, "logprobs": 1, **LONG}),
    "prompt_logprobs, n of 2": ([2, 4] * 20, {"prompt_logprobs": 0, "n": 2, **LONG}),
    "json": ([4], {"max_tokens": 60, "logprobs": 1, **asking(json=SCHEMA)}),
    "regex, n of 3": ([4, 5], {"n": 3, "max_tokens": 40, **asking(regex=REGEX)}),
    "grammar": (SHARED, {"max_tokens": 40, "prompt_logprobs": 1, **asking(grammar=GRAMMAR)}),
    "choice, n of 4": ([6] * 20, {"n": 4, "max_tokens": 12, **asking(choice=CHOICE)}),
    "json, beams": ([4], {"beam_width": 2, "n": 2, "max_tokens": 30, **asking(json_object=True)}),
    "stops": ([9, 2, 9, 2], {"stop": ["}}"], "bad_words": ["na"], "min_tokens": 20, **LONG}),
    "thinking budget": (
        [7, 8],
        {"thinking_budget": ThinkingBudget(max_tokens=5, begin="{", end="null,"), **LONG},
    ),
    "adapter": ([8, 8, 3], {"logprobs": 1, **LONG}),
    "adapter with own weights": (SHARED, {"n": 2, "prompt_logprobs": 1, **LONG}),
}
ADAPTERS = {"adapter": 3, "adapter with own weights": 1}
"""Number of the adapter of a kind: an own one and one with weights of its own."""
NUM_ADAPTERS = 4

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a prefix cache": {"prefix_cache": False},
    "int8 KV": {"kv_dtype": "int8"},
    "in pieces": {"max_num_batched_tokens": 7, "chunked_prefill_size": 3},
    "multi-step decoding": {"multi_step_ms": 1e6},
    "late": {"late": True},
    "suffix tree": {"proposer": "suffix"},
    "auto": {"proposer": "auto", "adaptive_speculation": True},
    "draft model": {"how": "draft_model", "depth": 3},
    "EAGLE-3 drafter": {"how": "draft_model", "drafted_tokens": 30, "depth": 3},
    "Medusa heads": {"how": "medusa", "depth": 3, "width": 2},
    "few blocks": {"slots": 384},
}


@cache
def model() -> Any:
    return tiny_model(11, vocab=VOCAB, context=128)


def engine_of(how: str = "", drafted_tokens: int = 0, **options: Any) -> Engine:
    options = {"slots": 1600, "max_num_seqs": PLACES, "vocabulary": JsonVocabulary(), **options}
    if how:
        drafter = random_drafter(model(), vocab=drafted_tokens) if drafted_tokens else None
        engine, _ = draft_engine(model(), how, drafter=drafter, **{"kv_dtype": "bf16", **options})
    else:
        engine = tiny_engine(model(), "cpu", **{"kv_dtype": "bf16", **options})
    for number in range(NUM_ADAPTERS):
        engine.load_adapter(str(number), adapter(number))
    return engine


@cache
def adapter(number: int) -> Adapter:
    return adapter_of(0, number)


def add(engine: Engine, kind: str, priority: int = 0) -> str:
    prompt, params = KINDS[kind]
    number = ADAPTERS.get(kind)
    options = RequestOptions(priority=priority, adapter=None if number is None else str(number))
    return engine.add_request(prompt, SamplingParams(seed=5, **params), options)


@cache
def alone(kind: str, kv_dtype: str) -> RequestOutput:
    engine = engine_of(kv_dtype=kv_dtype, prefix_cache=False, jump_forward=False)
    add(engine, kind)
    (result,) = (update.result for update in drain(engine) if update.result)
    return result


@pytest.mark.parametrize("method", METHODS)
def test_preempted_and_urgent_requests_of_any_kind(method: str) -> None:
    """Each kind gives way once at each of several steps, to another kind that takes all places."""
    options = METHODS[method]
    engine = engine_of(**options)
    urgent_kinds = [kind for kind in KINDS if " of 4" in kind]
    turn, preempted = count(), set[str]()
    for kind in KINDS:
        for steps in STEPS:
            before = engine.stats().preemptions
            asked = {add(engine, kind, priority=2): kind}
            updates = [update for _ in range(steps) for update in engine.step()]
            urgent = urgent_kinds[next(turn) % len(urgent_kinds)]
            asked[add(engine, urgent, priority=-2)] = urgent
            updates += drain(engine)
            if engine.stats().preemptions > before:
                preempted.add(kind)
            for update in updates:
                if update.result:
                    name = asked.pop(update.request_id)
                    same(update.result, alone(name, options.get("kv_dtype", "bf16")), exact=True)
            assert not asked
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and stats.proposer_failures == 0
    assert preempted == set(KINDS)
