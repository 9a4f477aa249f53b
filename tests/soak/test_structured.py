"""Memory and time of long structured outputs: the length changes neither.

`make soak` runs 8 outputs of 8,000 tokens, `make test` a short form.
"""

import gc
from time import perf_counter
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.grammar.constraint import OutputConstraint
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.json_vocabulary import JsonVocabulary
from tests.soak.test_soak import ROUNDS, resident
from tests.tiny import tiny_engine, tiny_model

IS_LONG = ROUNDS > 500
TOKENS = 8000 if IS_LONG else 700
OUTPUTS = 8
KV_BYTES = 23_040
"""KV of one token of the default model (30 layers, 3 heads of 64, bf16)."""
ITEM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-e ,.]*"},
    # No text of the schema ends before the last token.
    "json": {"json": {"type": "array", "items": ITEM, "minItems": 2000}},
}


def engine_of(**options: Any) -> Engine:
    model = tiny_model(11, dim=8, heads=1, kv_heads=1, layers=1, ffn=8, context=TOKENS + 64)
    slots = OUTPUTS * (TOKENS + 64)
    return tiny_engine(model, "cpu", vocabulary=JsonVocabulary(()), slots=slots, **options)


def grow(engine: Engine, outputs: StructuredOutputs | None) -> tuple[list[float], int, int]:
    """Seconds of each step, resident bytes and bytes of grammars when the outputs are long."""
    asked = SamplingParams(
        seed=1, n=OUTPUTS, max_tokens=TOKENS, ignore_eos=True, structured_outputs=outputs
    )
    seconds: list[float] = []
    end = engine.stats().tokens + OUTPUTS * (TOKENS - 40)
    request_id = engine.add_request([1], asked)
    while engine.stats().tokens < end:
        started = perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
    gc.collect()
    held, counted = resident(), engine.stats().grammar_bytes
    engine.abort(request_id)
    return seconds, held, counted


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_time_are_flat_in_the_length(kind: str) -> None:
    """Memory is within 1 % of the memory of unstructured outputs, with the default model's KV."""
    engine, outputs = engine_of(), StructuredOutputs(**KINDS[kind])
    engine.check([1], SamplingParams(structured_outputs=outputs))  # compiles the grammar
    plain, before, none = grow(engine, None)
    structured, after, counted = grow(engine, outputs)
    kv = OUTPUTS * TOKENS * KV_BYTES
    assert after - before < 0.01 * kv + 2e6, f"{before / 1e6:.1f} MB and {after / 1e6:.1f} MB"
    assert none == 0 < counted < 200 * OUTPUTS * TOKENS

    # The mask and its sampling may not cost more at the end than at the beginning.
    added = [_fastest(structured, part) - _fastest(plain, part) for part in (1, 3)]
    assert added[1] < 2 * added[0] + 1e-4, added
    if IS_LONG:
        print(f"{kind}: {before / 1e6:.1f} MB, structured {after / 1e6:.1f} MB; a step {added} s")


def _fastest(seconds: list[float], part: int) -> float:
    """The fastest step of a quarter."""
    quarter = len(seconds) // 4
    return min(seconds[part * quarter : (part + 1) * quarter])


@pytest.mark.parametrize("proposer", ["off", "auto"])
def test_rejected_drafts_are_forgotten(proposer: str) -> None:
    engine = engine_of(proposer=proposer)
    gc.collect()
    asked = SamplingParams(
        seed=1, n=2, max_tokens=200, structured_outputs=StructuredOutputs(regex="[a-e ,.]*")
    )
    engine.add_request([1], asked)
    while engine.stats().tokens < 300:
        engine.step()
    gc.collect()
    constraints = [item for item in gc.get_objects() if isinstance(item, OutputConstraint)]
    assert len(constraints) == 1 + asked.n  # of the request, and of each output
    assert all(len(item._masks) < 40 for item in constraints)
    assert (proposer == "off") == (engine.stats().drafted == 0)
