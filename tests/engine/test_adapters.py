"""Adapters in the engine: a batch may mix them, and they may be loaded and unloaded while requests
run.
"""

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend_traits import traits_of
from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.model import linear_weights, tensor_shapes
from headrace.model.spec import EarlyExit, ModelSpec
from headrace.outputs import RequestOutput
from headrace.program.adapter import Adapter, LowRank, OwnWeight, TokenRows
from headrace.quant.formats import StoredTensor
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.draft_engines import draft_engine
from tests.drafters import random_drafter
from tests.engine.test_promise import BACKENDS, EOS, LOADS, MODELS, REQUESTS, VOCAB, model, same
from tests.random_trees import RandomTrees
from tests.tiny import drain, tiny_engine, tiny_model

RANKS = (1, 2, 3, 8, 16, 17, 40, 64)


@cache
def adapter(which: int, number: int) -> Adapter:
    return adapter_of(model(which)[0], number)


def adapter_of(spec: ModelSpec, number: int) -> Adapter:
    """Matrices of a different rank for each adapter, for some linear weights of a model; the first
    adapter has all of them. Every third adapter has weights of its own too.
    """
    shapes, rng = tensor_shapes(spec), np.random.default_rng(number)
    names = [
        name
        for i, name in enumerate(sorted(linear_weights(spec)))
        if number == 0 or (i + number) % 3
    ]

    def matrix(rows: int, cols: int) -> Any:
        return (rng.standard_normal((rows, cols)) * 0.4).astype(np.float32)

    low_rank = {
        name: LowRank(
            matrix(RANKS[number], shapes[name][1]), matrix(shapes[name][0], RANKS[number]), 0.5
        )
        for name in names
    }
    if number % 3 != 1:
        return low_rank

    def own(name: str) -> OwnWeight:
        return OwnWeight(values=StoredTensor.from_floats(name, 2 * matrix(*shapes[name])))

    norms = np.abs(matrix(1, shapes[names[0]][0]))[0]
    tokens = TokenRows(np.array([3, 7]), matrix(2, spec.dim))
    return {
        **low_rank,
        names[0]: OwnWeight(delta=low_rank[names[0]], row_norms=norms),
        "embed": OwnWeight(rows=tokens) if number > 1 else own("embed"),
        "head": OwnWeight(delta=LowRank(matrix(2, spec.dim), matrix(spec.vocab_size, 2), 1.0)),
        "layers.0.mlp_norm": OwnWeight(added=matrix(1, spec.dim)[0]),
        "layers.1.o_bias": OwnWeight(added=matrix(1, spec.dim)[0]),
    }


def engine_with(engine: Engine, which: int) -> Engine:
    for number in range(len(RANKS)):
        engine.load_adapter(f"a{number}", adapter(which, number))
    return engine


def named(number: int) -> str | None:
    return None if number < 0 else f"a{number}"


@cache
def alone(backend: str, which: int, kv_dtype: str, number: int) -> list[RequestOutput]:
    """Run each request by itself, in one piece, with this adapter; -1: without one."""
    engine = tiny_engine(
        model(which),
        backend,
        eos_ids=EOS,
        kv_dtype=kv_dtype,
        prefix_cache=False,
        release_outside_window=False,
    )
    if number >= 0:
        engine.load_adapter("it", adapter(which, number))
    return [run_one(engine, request, "it" if number >= 0 else None) for request in REQUESTS]


def run_one(
    engine: Engine, request: tuple[list[int], SamplingParams], name: str | None
) -> RequestOutput:
    engine.add_request(*request, options=RequestOptions(adapter=name))
    (result,) = (update.result for update in drain(engine) if update.result)
    return result


NUMBERS = st.lists(st.integers(-1, len(RANKS) - 1), min_size=12, max_size=12)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(numbers=NUMBERS, drafts=st.booleans(), **LOADS)
def test_adapters_in_one_batch_give_the_tokens_of_separate_runs(
    backend: str,
    which: int,
    order: list[int],
    numbers: list[int],
    kv_dtype: str,
    drafts: bool,
    stagger: int,
    **config: Any,
) -> None:
    proposer = RandomTrees(0, VOCAB, {}, max_nodes=9) if drafts else "suffix"
    engine = engine_with(
        tiny_engine(
            model(which), backend, proposer=proposer, eos_ids=EOS, kv_dtype=kv_dtype, **config
        ),
        which,
    )
    updates, ids = [], []
    for request, number in zip(order, numbers, strict=False):
        ids.append(
            engine.add_request(*REQUESTS[request], options=RequestOptions(adapter=named(number)))
        )
        for _ in range(stagger):
            updates += engine.step()
    updates += drain(engine)
    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, request, number in zip(ids, order, numbers, strict=False):
        result = results[request_id]
        assert result is not None
        same(result, alone(backend, which, kv_dtype, number)[request], exact=backend == "cpu")
    assert engine.stats().blocks_free == engine.stats().blocks_total and set(
        engine.stats().adapters.values()
    ) == {0}


@pytest.mark.parametrize("which", range(len(MODELS)))
def test_adapters_change_the_logprobs(which: int) -> None:
    assert (
        len(
            {
                repr(alone("cpu", which, "f32", number)[0].outputs[0].logprobs)
                for number in range(-1, len(RANKS))
            }
        )
        == len(RANKS) + 1
    )


@pytest.mark.parametrize("how", ["draft_model", "EAGLE-3", "self_draft", "medusa"])
def test_a_draft_model_without_the_adapter_only_drafts(how: str) -> None:
    drafter = random_drafter(model(0), vocab=30) if how == "EAGLE-3" else None
    method = "draft_model" if drafter else how
    engine = draft_engine(model(0), method, drafter=drafter, eos_ids=EOS, kv_dtype="f32")[0]
    engine = engine_with(engine, 0)
    for number in range(-1, 3):
        same(
            run_one(engine, REQUESTS[0], named(number)),
            alone("cpu", 0, "f32", number)[0],
            exact=True,
        )
    assert engine.stats().drafted > 0 and engine.stats().proposer_failures == 0


@pytest.mark.parametrize("kv_dtype", traits_of("cpu").kv_dtypes)
def test_the_prefix_cache_is_separate_for_each_adapter(kv_dtype: str) -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", eos_ids=EOS, kv_dtype=kv_dtype, slots=800), 0)
    prompt = REQUESTS[2][0] * 2, SamplingParams(temperature=0, max_tokens=5)
    assert [run_one(engine, prompt, named(number)).cached_tokens for number in (-1, 0, 1)] == [
        0,
        0,
        0,
    ]
    cached = {number: run_one(engine, prompt, named(number)).cached_tokens for number in (-1, 0, 1)}
    assert len(set(cached.values())) == 1 and cached[0] > 0
    engine.unload_adapter("a0")
    engine.load_adapter("a0", adapter(0, 5))  # another under its name
    assert run_one(engine, prompt, "a0").cached_tokens == 0
    engine.close()


def test_an_adapter_may_be_unloaded_while_a_request_runs() -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", eos_ids=EOS, kv_dtype="f32"), 0)
    engine.add_request(*REQUESTS[0], options=RequestOptions(adapter="a1"))
    updates = engine.step()
    assert engine.stats().adapters["a1"] == 1
    engine.unload_adapter("a1")
    engine.load_adapter("a1", adapter(0, 2))
    with pytest.raises(RequestError, match="is already loaded"):
        engine.load_adapter("a1", adapter(0, 2))
    updates += drain(engine)
    assert updates[-1].result
    same(updates[-1].result, alone("cpu", 0, "f32", 1)[0], exact=True)
    same(run_one(engine, REQUESTS[0], "a1"), alone("cpu", 0, "f32", 2)[0], exact=True)


def test_the_memory_of_an_unloaded_adapter_is_reused() -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", kv_dtype="f32"), 0)
    plan: Any = engine._loop.executable
    for _ in range(3):
        engine.unload_adapter("a0")
        with pytest.raises(ValueError, match="no such adapter"):
            plan.plan.adapter_bytes(0)
        engine.load_adapter("a0", adapter(0, 0))
        assert plan.plan.adapter_bytes(0) > 0


def test_an_unloaded_adapter_is_removed_with_its_last_request() -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", kv_dtype="f32"), 0)
    plan: Any = engine._loop.executable
    ids = [engine.add_request([1, 2, 3], options=RequestOptions(adapter="a2")) for _ in range(3)]
    engine.abort(ids[0])
    assert engine.stats().adapters["a2"] == 2
    before = engine.stats().adapter_bytes
    engine.unload_adapter("a2")
    engine.abort(ids[1])
    assert plan.plan.adapter_bytes(2) > 0 and engine.stats().adapter_bytes == before
    engine.abort(ids[2])
    with pytest.raises(ValueError, match="no such adapter"):
        plan.plan.adapter_bytes(2)
    assert engine.stats().adapter_bytes == before - numbers_bytes(adapter(0, 2))


def numbers_bytes(adapter: Adapter) -> int:
    assert all(isinstance(change, LowRank) for change in adapter.values())
    return sum(4 * (change[0].size + change[1].size) for change in adapter.values())


def test_weights_of_an_unloaded_adapter_are_freed() -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", kv_dtype="f32"), 0)
    executable: Any = engine._loop.executable
    plans = [weakref.ref(variant.executable) for variant in executable._variants.values()]
    assert len(plans) == 3
    for number in range(len(RANKS)):
        engine.unload_adapter(f"a{number}")
    gc.collect()
    assert not executable._variants and all(plan() is None for plan in plans)


def test_adapter_names_are_checked() -> None:
    engine = tiny_engine(model(0))
    with pytest.raises(RequestError, match="unknown adapter 'x'; no adapter is loaded"):
        engine.add_request([1], options=RequestOptions(adapter="x"))
    engine_with(engine, 0)
    with pytest.raises(RequestError, match="unknown adapter 'a9'; did you mean"):
        engine.add_request([1], options=RequestOptions(adapter="a9"))
    checked = engine.check([1], options=RequestOptions(adapter="a1"))
    engine.unload_adapter("a1")
    with pytest.raises(RequestError, match="unknown adapter 'a1'"):
        engine.add(checked)
    with pytest.raises(RequestError, match="unknown adapter 'a1'"):
        engine.unload_adapter("a1")
    assert not engine.has_work


def test_a_launched_step_keeps_its_adapter_until_it_is_finished() -> None:
    engine = engine_with(tiny_engine(model(0), "cpu", eos_ids=EOS, kv_dtype="f32", late=True), 0)
    ended, other = (
        engine.add_request(*REQUESTS[0], options=RequestOptions(adapter=name))
        for name in ("a1", "a2")
    )
    for _ in range(3):
        engine.step()
    assert engine._loop.in_flight, "or there is nothing to show"
    engine.unload_adapter("a1")
    engine.abort(ended)
    (result,) = (update.result for update in drain(engine) if update.result)
    assert result.request_id == other
    same(result, alone("cpu", 0, "f32", 2)[0], exact=True)


def test_an_adapter_of_a_tied_head_changes_the_head_at_an_early_exit_too() -> None:
    """Its own embedding changes neither."""
    spec, tensors = tiny_model(0, tied_embeddings=True)
    exits = replace(spec, early_exit=EarlyExit(1, 0.0))  # all rows leave
    rows = np.random.default_rng(0).standard_normal((VOCAB, spec.dim)).astype(np.float32)
    heads = {"head": OwnWeight(values=StoredTensor.from_floats("head", rows))}
    embeddings = {"embed": OwnWeight(values=StoredTensor.from_floats("embed", rows))}
    for own in (heads, embeddings):
        expected, result = (
            run_one(with_adapter(tiny_engine((each, tensors), "cpu"), own), REQUESTS[0], "it")
            for each in (spec.with_layers((0,)), exits)
        )
        same(result, expected, exact=True)


def test_an_adapter_may_have_a_bias_of_rows_that_meet_zeros() -> None:
    made = tiny_model(0, activation="relu", format="Q4_0")
    bias = np.linspace(-1, 1, made[0].ffn_dim, dtype=np.float32)
    own = {
        "layers.0.up_bias": OwnWeight(added=bias),
        "layers.1.down_bias": OwnWeight(added=bias[:32]),
    }
    plain, engine = (tiny_engine(made, "cpu", skip_zeros=skips) for skips in (False, True))
    without = run_one(plain, REQUESTS[0], None)
    results = [run_one(with_adapter(each, own), REQUESTS[0], "it") for each in (plain, engine)]
    same(*results, exact=True)
    assert results[0].outputs[0].logprobs != without.outputs[0].logprobs


def with_adapter(engine: Engine, adapter: Adapter) -> Engine:
    engine.load_adapter("it", adapter)
    return engine
