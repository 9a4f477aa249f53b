"""Each option of a request gives the results of plain decoding under each proposer, bit for bit."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.engine.engine import Engine
from headrace.model import tensor_shapes
from headrace.outputs import RequestOutput
from headrace.program.adapter import Adapter, LowRank
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from tests.composability import METHODS, Method
from tests.draft_options import OPTIONS, PAGE, SAMPLED, RequestOption, page
from tests.engine.test_composability import engine_of
from tests.engine.test_promise import same
from tests.tiny import drain, run_all, tiny_engine, tiny_model

PROMPTS = [[7, 8, 9] * 5, [*range(1, 30), *range(1, 12)]]
EMBEDDED = [5, 6, 7] * 4
MAX_TOKENS = 36
MODEL = tiny_model(seed=3)


@cache
def adapter() -> Adapter:
    rng, shapes = np.random.default_rng(1), tensor_shapes(MODEL[0])

    def matrix(rows: int, cols: int) -> Any:
        return (rng.standard_normal((rows, cols)) * 0.4).astype(np.float32)

    rows, cols = shapes["layers.1.down"]
    return {"layers.1.down": LowRank(matrix(2, cols), matrix(rows, 2), 0.5)}


@cache
def engine_with(title: str) -> Engine:
    """An engine for all options that drafts by a method; no title: plain decoding."""
    options: dict[str, Any] = {"slots": 3200, "kv_dtype": "bf16"}
    if not title:
        engine = tiny_engine(MODEL, "cpu", prefix_cache=False, **options)
    else:
        method = next(each for each in METHODS if each.title == title)
        engine = engine_of(method, MODEL, options | dict(method.options))
    engine.load_adapter("small", adapter())
    return engine


def params_of(option: RequestOption) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **option.params})


def add(engine: Engine, option: RequestOption, prompt: list[int]) -> str:
    options = RequestOptions(adapter="small" if option.adapter else None)
    return engine.add_request(prompt, params_of(option), options=options)


def results_of(engine: Engine) -> dict[str, RequestOutput]:
    return {update.request_id: update.result for update in drain(engine) if update.result}


def vector_of(results: dict[str, RequestOutput], request_id: str) -> bytes:
    embedding = results[request_id].embedding
    assert embedding is not None
    return embedding.tobytes()


def embed(engine: Engine) -> str:
    return engine.add(engine.check(EMBEDDED, pooling=PoolingParams()))


@cache
def plain(title: str) -> list[RequestOutput]:
    option = next(each for each in OPTIONS if each.title == title)
    engine, results = engine_with(""), []
    for prompt in PROMPTS:
        request_id = add(engine, option, prompt)
        results.append(results_of(engine)[request_id])
    return results


@cache
def plain_vector() -> bytes:
    request_id = embed(engine_with(""))
    return vector_of(results_of(engine_with("")), request_id)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.title)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_an_option_gives_the_results_of_plain_decoding(
    method: Method, option: RequestOption
) -> None:
    engine = engine_with(method.title)
    before = engine.stats()
    request_ids = [add(engine, option, prompt) for prompt in PROMPTS]
    embedding_id = embed(engine) if option.embedding else ""
    results = results_of(engine)

    for request_id, expected in zip(request_ids, plain(option.title), strict=True):
        same(results[request_id], expected, exact=True)
    if option.embedding:
        assert vector_of(results, embedding_id) == plain_vector()
    stats = engine.stats()
    assert stats.proposer_failures == 0 and stats.blocks_free == stats.blocks_total
    if "adaptive" not in method.title:
        assert (stats.drafted > before.drafted) == option.drafts


def test_the_options_have_an_effect() -> None:
    """No option gives the results of another, so that a dropped option fails its tests."""
    texts = [
        (str(plain(option.title)), option.title)
        for option in OPTIONS
        if not option.embedding and option.title != "logprobs"
    ]
    assert len({text for text, _ in texts}) == len(texts)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_logprobs_of_generation_and_scoring_are_equal(method: Method) -> None:
    """The sampled tokens are scored later, as a prompt, in the same engine and in a plain one."""
    engine = engine_with(method.title)
    sampled = run_all(
        engine,
        [(prompt, SamplingParams(**SAMPLED, max_tokens=24, logprobs=0)) for prompt in PROMPTS],
    )
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    for prompt, result in zip(PROMPTS, sampled, strict=True):
        output = result.outputs[0]
        text = prompt + output.token_ids
        for scorer in (engine, engine_with("")):
            (scores,) = run_all(scorer, [(text, scored)])
            assert scores.prompt_logprobs is not None and output.logprobs is not None
            generated = [
                each[token].logprob
                for each, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
            assert [
                each[token].logprob
                for each, token in zip(
                    scores.prompt_logprobs[len(prompt) :], output.token_ids, strict=True
                )
                if each is not None
            ] == generated


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.draft_options`"
