"""Embeddings: the pooled rows are the model's, and the bits do not depend on the batch or the
chunks.
"""

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.engine.engine import Engine
from headrace.engine.pooling import PromptPooling
from headrace.errors import NonFiniteLogitsError, RequestError
from headrace.logit_ops import Pooled
from headrace.outputs import RequestOutput
from headrace.request import Pooling, PoolingParams
from headrace.sampling.pooling import RowSum, mean_vector
from headrace.sampling_params import SamplingParams
from tests.draft_engines import draft_engine
from tests.engine.test_promise import LOADS, MODELS, REQUESTS, VOCAB, alone, model, same, truth
from tests.engine.toy import toy_engine, toy_vector
from tests.random_trees import RandomTrees
from tests.tiny import drain, tiny_engine

PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], [3], list(range(1, 38)), [*range(1, 34), 50, 51]]
"""To be embedded; the last two begin alike, with a block of the cpu backend."""
HOW = [
    PoolingParams(pooling=pooling, normalise=normalise)
    for pooling in get_args(Pooling)
    for normalise in (False, True)
]
Vector = NDArray[np.float32]


def embed(engine: Engine, prompt: list[int], how: PoolingParams) -> str:
    return engine.add(engine.check(prompt, pooling=how))


def results_of(engine: Engine) -> dict[str, RequestOutput]:
    return {update.request_id: update.result for update in drain(engine) if update.result}


def vector_of(result: RequestOutput) -> Vector:
    assert result.embedding is not None and [output.finish_reason for output in result.outputs] == [
        "stop"
    ], result.error
    assert result.outputs[0].token_ids == [] and result.outputs[0].text == ""
    return result.embedding


@cache
def vectors_alone(which: int, kv_dtype: str) -> dict[tuple[int, PoolingParams], bytes]:
    """Embed each prompt by itself, in one piece."""
    engine = tiny_engine(
        model(which), "cpu", kv_dtype=kv_dtype, prefix_cache=False, release_outside_window=False
    )
    vectors = {}
    for i, prompt in enumerate(PROMPTS):
        for how in HOW:
            embed(engine, prompt, how)
            (result,) = results_of(engine).values()
            vectors[i, how] = vector_of(result).tobytes()
    return vectors


EMBEDDED = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.sampled_from(HOW)), min_size=1, max_size=8
)


@settings(max_examples=25, deadline=None)
@given(embedded=EMBEDDED, drafts=st.booleans(), **LOADS)
def test_an_embedding_has_the_same_bits_in_any_batch(
    embedded: list[tuple[int, PoolingParams]],
    drafts: bool,
    which: int,
    order: list[int],
    stagger: int,
    kv_dtype: str,
    **options: Any,
) -> None:
    expected, vectors = alone("cpu", which, kv_dtype), vectors_alone(which, kv_dtype)
    given = [
        value
        for i in range(max(len(order), len(embedded)))
        for value in (*order[i : i + 1], *embedded[i : i + 1])
    ]
    if drafts:
        numbers = [request if isinstance(request, int) else -1 for request in given]
        known = truth(expected + expected[:1], [number if number >= 0 else 0 for number in numbers])
        options["proposer"] = RandomTrees(0, VOCAB, known, 9)
    engine = tiny_engine(model(which), "cpu", eos_ids=(60,), kv_dtype=kv_dtype, **options)
    asked, results = {}, {}
    for request in given:
        generates = isinstance(request, int)
        asked[
            engine.add_request(*REQUESTS[request])
            if generates
            else embed(engine, PROMPTS[request[0]], request[1])
        ] = request
        for _ in range(stagger):
            results |= {
                update.request_id: update.result for update in engine.step() if update.result
            }
    results |= results_of(engine)
    for request_id, request in asked.items():
        if isinstance(request, int):
            same(results[request_id], expected[request], exact=True)
        else:
            assert vector_of(results[request_id]).tobytes() == vectors[request]
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and stats.finished == len(given)


@pytest.mark.parametrize("how", ["medusa", "self_draft", "draft_model"])
def test_embeddings_with_draft_models(how: str) -> None:
    engine, _ = draft_engine(model(0), how, depth=3, slots=800)
    ids = {embed(engine, PROMPTS[2], each): each for each in HOW}
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=30))
    results = results_of(engine)
    assert engine.stats().drafted > 0
    for request_id, each in ids.items():
        assert vector_of(results[request_id]).tobytes() == vectors_alone(0, "f32")[2, each]


@pytest.mark.parametrize("which", range(len(MODELS)))
def test_embeddings_of_cpu_and_reference_agree(which: int) -> None:
    if MODELS[which].get("format"):
        return  # int8 activations are not float64
    engine = tiny_engine(model(which), "reference", slots=800, kv_dtype="f32")
    ids = {embed(engine, PROMPTS[2], how): how for how in HOW}
    for request_id, result in results_of(engine).items():
        fast = np.frombuffer(vectors_alone(which, "f32")[2, ids[request_id]], np.float32)
        assert np.abs(vector_of(result) - fast).max() < 1e-4 * np.abs(fast).max()


def test_pooling_last_mean_and_cls() -> None:
    engine = toy_engine()
    ids = {
        embed(engine, [4, 5, 6, 7], PoolingParams(pooling=pooling)): pooling
        for pooling in get_args(Pooling)
    }
    for request_id, result in results_of(engine).items():
        assert vector_of(result).tolist() == toy_vector([4, 5, 6, 7], ids[request_id]).tolist()


def test_mean_pooling_adds_rows_in_order() -> None:
    rows = (
        np.random.default_rng(0).normal(0, 1, (50, 3)) * 10.0 ** (np.arange(50) % 9)[:, None]
    ).astype(np.float32)
    sums = {RowSum().add(rows).tobytes()}
    for cut in range(1, 50):
        state = RowSum()
        state.add(rows[:cut])
        sums.add(state.add(rows[cut:]).tobytes())
    assert len(sums) == 1
    vector = mean_vector(np.array([3.0, 4.0]), 2, normalise=True)
    assert vector.dtype == np.float32 and vector == pytest.approx([0.6, 0.8])
    assert mean_vector(np.zeros(2), 2, normalise=True).tolist() == [0, 0]


def test_embeddings_use_the_prefix_cache() -> None:
    """`last` computes only the last row, `mean` computes all rows and caches them."""
    engine = toy_engine(block_size=4)
    cached = {}
    for pooling in ("mean", "mean", "last", "cls"):
        request_id = embed(engine, [1, 2, 3] * 4, PoolingParams(pooling=pooling))
        result = results_of(engine)[request_id]
        cached[pooling] = result.cached_tokens
        assert vector_of(result).tolist() == toy_vector([1, 2, 3] * 4, pooling).tolist()
    assert cached == {"mean": 0, "last": 8, "cls": 0}


def test_cls_pooling_ends_after_the_first_row() -> None:
    engine = toy_engine(max_num_batched_tokens=4)
    embed(engine, [1] * 30, PoolingParams(pooling="cls"))
    results_of(engine)
    assert engine.stats().rows == 4 and engine.stats().blocks_free == engine.stats().blocks_total


def test_pooled_rows_have_no_logits() -> None:
    engine = toy_engine()
    embed(engine, [1] * 30, PoolingParams(pooling="mean"))
    results_of(engine)
    assert engine._loop.executable.largest == (30, 0, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("prefix_cache", "rows"), [(False, 8 + 18), (True, 18)])
def test_mean_pooling_continues_after_preemption(prefix_cache: bool, rows: int) -> None:
    """Rows that were pooled are not pooled again, and may come from the cache."""
    engine = toy_engine(max_num_batched_tokens=4, prefix_cache=prefix_cache)
    request_id = embed(engine, [1, 2, 3] * 6, PoolingParams(pooling="mean"))
    for _ in range(2):
        engine.step()
    engine._scheduler._preempt(engine._scheduler.running[0])
    assert (
        vector_of(results_of(engine)[request_id]).tolist()
        == toy_vector([1, 2, 3] * 6, "mean").tolist()
    )
    assert engine.stats().rows == rows


@pytest.mark.parametrize("late", [False, True])
def test_embeddings_in_a_static_batch(late: bool) -> None:
    engine = toy_engine(batching="static", late=late)
    ids = {
        embed(engine, [4, 5, 6, 7], PoolingParams(pooling=pooling)): pooling
        for pooling in get_args(Pooling)
    }
    text = engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=9))
    results = results_of(engine)
    assert len(results.pop(text).outputs[0].token_ids) == 9
    for request_id, result in results.items():
        assert vector_of(result).tolist() == toy_vector([4, 5, 6, 7], ids[request_id]).tolist()
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_non_finite_rows_fail_one_embedding() -> None:
    engine = toy_engine(broken=3)
    bad, good = (
        embed(engine, prompt, PoolingParams(pooling="mean")) for prompt in ([1, 2, 3], [1, 2, 4])
    )
    results = results_of(engine)
    assert isinstance(results[bad].error, NonFiniteLogitsError) and "hidden rows" in str(
        results[bad].error
    )
    assert (
        results[bad].embedding is None
        and vector_of(results[good]).tolist() == toy_vector([1, 2, 4], "mean").tolist()
    )


def test_each_row_is_pooled_once() -> None:
    """Ten tokens in steps of four; after the second step all KV is lost and recomputed."""
    steps = ((0, 4), (4, 4), (0, 6), (6, 4))
    expected: dict[Pooling, list[range]] = {
        "last": [range(0), range(0), range(0), range(9, 10)],
        "mean": [range(4), range(4, 8), range(0), range(8, 10)],
        "cls": [range(1), range(0), range(0), range(0)],
    }
    for pooling, ranges in expected.items():
        rows = PromptPooling(PoolingParams(pooling=pooling), 10)
        for step, pooled in zip(steps, ranges, strict=True):
            assert rows.rows(*step) == pooled
            assert rows.receive(len(pooled), Pooled(np.array([3.0, 4.0])))
        assert rows.vector is not None


def test_an_embedding_is_complete_after_all_rows() -> None:
    total = Pooled(np.array([30.0, -40.0]))
    for normalise, expected in ((False, [3.0, -4.0]), (True, [0.6, -0.8])):
        rows = PromptPooling(PoolingParams(pooling="mean", normalise=normalise), 10)
        assert rows.state.add(np.ones((2, 2), np.float32)).tolist() == [2.0, 2.0]
        vectors: list[Vector | None] = []
        for num_rows, result in ((6, total), (4, None), (4, total)):  # None: not finite
            assert rows.receive(num_rows, result) is (result is not None)
            vectors.append(rows.vector)
        assert vectors[0] is vectors[1] is None and vectors[2] is not None
        assert vectors[2].tolist() == np.array(expected, np.float32).tolist()


def test_an_embedded_prompt_may_fill_the_context() -> None:
    engine = toy_engine(max_model_len=12, num_blocks=3)
    request_id = embed(engine, [1] * 12, PoolingParams())
    assert (
        vector_of(results_of(engine)[request_id]).tolist() == toy_vector([1] * 12, "last").tolist()
    )
    with pytest.raises(
        RequestError, match="13 tokens, but max_model_len 12 allows 12; shorten the prompt"
    ):
        embed(engine, [1] * 13, PoolingParams())
    engine = toy_engine(max_model_len=12, num_blocks=2)
    with pytest.raises(
        RequestError,
        match="the prompt of 12 tokens needs up to 3 blocks of 4 tokens, but the cache has 2",
    ):
        embed(engine, [1] * 12, PoolingParams())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling": "max"}, "pooling must be last, mean, cls, not 'max'"),
        ({"normalise": 1}, "normalise must be true or false, not 1"),
    ],
)
def test_pooling_params_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**given)
