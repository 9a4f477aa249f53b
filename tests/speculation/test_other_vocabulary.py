"""A draft model with other tokens: right drafts, few rows, and the text of any sequence."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.translation import Translator
from headrace.loader.draft_vocabulary import other_vocabulary
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.draft_model import DraftModelProposer
from headrace.structured_outputs import StructuredOutputs
from tests.draft_engines import draft_engine
from tests.tiny import (
    OtherTinyVocabulary,
    Tensors,
    TinyVocabulary,
    run_all,
    tiny_engine,
    tiny_model,
)

VOCAB = 61
MODEL = tiny_model(seed=3)
PROMPTS = [[7, 8, 9] * 5, [*range(1, 19), *range(1, 12)]]
SAMPLED = SamplingParams(seed=5, temperature=0.8, max_tokens=24)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


class Reversed(TinyVocabulary):
    """The same tokens, with ids from the last to the first."""

    def __init__(self, size: int = VOCAB) -> None:
        super().__init__(size)
        self.pieces = self.pieces[::-1]


def reversed_model() -> tuple[ModelSpec, Tensors]:
    """The model with its tokens reversed, so that it computes the same for the same text."""
    spec, tensors = MODEL
    changed = dict(tensors)
    for name in ("embed", "head"):
        rows = tensors[name].dequantise()[::-1]
        changed[name] = StoredTensor.from_floats(name, np.ascontiguousarray(rows))
    return spec, changed


def engine_with(monkeypatch: pytest.MonkeyPatch, own: TinyVocabulary, **options: Any) -> Any:
    found = other_vocabulary(Translator(TinyVocabulary(VOCAB), own, VOCAB, VOCAB))
    monkeypatch.setattr("tests.draft_engines.other_tokens", lambda *_: found)
    return draft_engine(MODEL, "draft_model", draft_tokens="given", slots=640, **options)


@pytest.mark.parametrize("width", [1, 2])
def test_the_model_with_reversed_ids_is_always_right(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Sampled drafts have the noise of the target's ids."""
    engine, _ = engine_with(monkeypatch, Reversed(), draft=reversed_model(), width=width)
    results = run_all(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    plain = run_all(
        tiny_engine(MODEL, "cpu", kv_dtype="f32"), [(prompt, SAMPLED) for prompt in PROMPTS]
    )
    assert [r.outputs for r in results] == [r.outputs for r in plain]
    stats = engine.stats()
    assert stats.proposer_failures == 0
    # The draft reads the text as its tokenizer cuts it: the outputs of a random model may not be.
    assert stats.accepted > 0.25 * stats.drafted / width


def test_greedy_and_sampled_requests_draft_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(monkeypatch, Reversed(), draft=reversed_model())
    grammar = StructuredOutputs(regex="([b-t]|a[^a])*")
    requests = [
        (PROMPTS[0], SAMPLED),
        (PROMPTS[0], GREEDY),
        (PROMPTS[1], replace(GREEDY, structured_outputs=grammar)),
        (PROMPTS[1], GREEDY),
    ]
    results = run_all(engine, requests)
    assert [r.outputs for r in results] == [
        run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), [request])[0].outputs
        for request in requests
    ]
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0
    assert all(result.drafts["draft_model"].proposed > 0 for result in results)


@pytest.mark.parametrize("shared", [True, False])
def test_few_tokens_are_computed_again(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """The draft's KV stays, except that of its last tokens, which further text may change."""
    own = OtherTinyVocabulary(VOCAB, shared=shared)
    engine, proposers = engine_with(monkeypatch, own, depth=1)
    proposer = proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    rows: list[int] = []
    launch = proposer._executable.launch

    def counted(batch: Any, *args: Any, **options: Any) -> Any:
        rows.append(len(batch.tokens))
        return launch(batch, *args, **options)

    monkeypatch.setattr(proposer._executable, "launch", counted)
    run_all(engine, [(PROMPTS[1] * 2, SAMPLED)])
    assert rows[0] > 20 and len(rows) > 10
    assert max(rows[1:]) <= 16 and sum(rows[1:]) < 6 * len(rows)


def test_samples_of_a_request_share_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, proposers = engine_with(monkeypatch, Reversed(), draft=reversed_model())
    params = replace(SAMPLED, n=3)
    result = run_all(engine, [(PROMPTS[1] * 2, params)])[0]
    plain = run_all(
        tiny_engine(MODEL, "cpu", slots=640, kv_dtype="f32"), [(PROMPTS[1] * 2, params)]
    )[0]
    assert result.outputs == plain.outputs
    proposer = proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)
    assert engine.stats().proposer_failures == 0 and engine.stats().drafted > 0
