"""KV offloading to host memory: fewer rows are computed, and the tokens stay the same."""

from importlib.metadata import version
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.loader.options import engine_config
from headrace.outputs import RequestOutput
from headrace.remote.host import report_of
from headrace.sampling_params import SamplingParams
from headrace.server.metrics import Metrics
from tests.engine.test_machine import SHAPES, STEMS, Life, Unruly
from tests.engine.test_prefix import one
from tests.engine.test_promise import EOS, MODELS, REQUESTS, alone, keeps_the_promise, model
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.tiny import run_all, tiny_engine

OFFLOAD = {"kv_offload_bytes": 1000}
"""More host blocks than any toy here needs, since each has one byte."""


def recurring(num_prompts: int, length: int, times: int) -> list[list[int]]:
    """Return prompts that recur one after the other."""
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = [
        rng.integers(VOCAB, size=length).tolist() for _ in range(num_prompts)
    ]
    return list(islice(cycle(prompts), num_prompts * times))


def is_empty(engine: Engine) -> bool:
    """Whether no block is held and no load is queued."""
    engine._kv.check([])
    return engine.stats().blocks_free == engine.stats().blocks_total and not engine._kv.host._queue


@pytest.mark.parametrize("windows", [(0,), (0, 5)])
@pytest.mark.parametrize("late", [False, True])
def test_recurring_prompts_are_computed_once(late: bool, windows: tuple[int, ...]) -> None:
    """Four prompts of six blocks in a cache of ten."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=5)
    prompts = recurring(4, 25, 3)
    rows = {}
    for offload in (0, 1000):
        engine = toy_engine(num_blocks=10, late=late, windows=windows, kv_offload_bytes=offload)
        for prompt in prompts:
            assert prompt + one(engine, prompt, params).outputs[0].token_ids == plain_decoding(
                prompt, params, 0
            )
        stats = engine.stats()
        rows[offload] = stats.rows
        figures = (stats.offloaded_blocks, stats.restored_blocks, stats.kv_host_bytes)
        assert is_empty(engine) and list(map(bool, figures)) == [bool(offload)] * 3
        assert stats.cached_tokens == (8 * 24 if offload else 0)
    assert rows[0] - rows[1000] == 8 * 24


def test_a_preempted_sequence_loads_its_blocks() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = recurring(3, 17, 1)
    rows = {}
    for offload in (0, 1000):
        engine = toy_engine(num_blocks=14, kv_offload_bytes=offload)
        for prompt, result in zip(
            prompts, run_all(engine, [(prompt, params) for prompt in prompts]), strict=True
        ):
            assert prompt + result.outputs[0].token_ids == plain_decoding(prompt, params, 0)
        stats = engine.stats()
        rows[offload] = stats.rows
        assert (
            stats.preemptions > 0
            and is_empty(engine)
            and (stats.restored_blocks > 0) == bool(offload)
        )
    assert rows[1000] < rows[0]


def test_offloading_is_skipped_if_loading_is_slower() -> None:
    engine = toy_engine(num_blocks=10, **OFFLOAD)
    for prompt in recurring(3, 25, 1):
        one(engine, prompt)
    before, store = engine.stats(), engine._kv.host._store
    assert store is not None and before.offloaded_blocks > 0
    store.block_seconds = 1e9
    for prompt in recurring(3, 25, 2):
        assert one(engine, prompt).cached_tokens == 0
    after = engine.stats()
    assert (after.offloaded_blocks, after.restored_blocks) == (
        before.offloaded_blocks,
        before.restored_blocks,
    )
    assert is_empty(engine)


def test_steps_measure_the_time_of_a_row() -> None:
    seconds = iter(range(10_000))
    engine = toy_engine(num_blocks=10, clock=lambda: float(next(seconds)), **OFFLOAD)
    one(engine, list(range(20)))
    assert 0 < engine._kv.host._row_seconds < 2


def test_a_failed_copy_fails_the_step() -> None:
    """Host copies are dropped, and all requests continue with the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=5)
    engine = toy_engine(num_blocks=10, **OFFLOAD)
    prompts = recurring(4, 25, 2)
    for prompt in prompts[:4]:
        one(engine, prompt, params)
    store: Any = engine._kv.host._store
    load = store.load

    def fails(*args: Any) -> None:
        store.load = load
        raise RuntimeError

    store.load = fails
    for prompt in prompts[4:]:
        assert prompt + one(engine, prompt, params).outputs[0].token_ids == plain_decoding(
            prompt, params, 0
        )
    assert engine.stats().failed_steps == 1 and is_empty(engine)


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {"kv_offload_bytes": 0}])
def test_offloading_may_be_off(options: dict[str, Any]) -> None:
    engine = toy_engine(num_blocks=10, **OFFLOAD | options)
    for prompt in recurring(4, 25, 2):
        one(engine, prompt)
    assert engine.stats().offloaded_blocks == 0 and engine._kv.host._store is None


def test_the_cpu_backend_has_no_offloading() -> None:
    engine = tiny_engine(model(0), "cpu", slots=128, kv_offload_bytes=1 << 20)
    assert engine._kv.host._store is None
    assert (
        tiny_engine(model(0), kv_offload_bytes=10)._kv.host._store is None
    )  # fewer bytes than a block has
    for wrong in (-1, 2**60, "1"):
        with pytest.raises(RequestError, match="kv_offload_bytes"):
            engine_config({"kv_offload_bytes": wrong})


def test_offloading_in_prometheus_metrics() -> None:
    engine = toy_engine(num_blocks=10, **OFFLOAD)
    for prompt in recurring(4, 25, 2):
        one(engine, prompt)
    stats = engine.stats()
    remote: Any = SimpleNamespace(report=report_of(stats), restarts=0, info=None)
    text = Metrics(remote, "toy").text().decode()
    labels = f'{{model_name="toy",version="{version("headrace")}"}}'
    assert f"headrace_kv_blocks_offloaded_total{labels} {float(stats.offloaded_blocks)}" in text
    assert f"headrace_kv_blocks_restored_total{labels} {float(stats.restored_blocks)}" in text
    assert f"headrace_kv_host_bytes{labels} {float(stats.kv_host_bytes)}" in text


def test_offloading_frees_its_memory() -> None:
    engine = toy_engine(num_blocks=10, **OFFLOAD)
    for prompt in recurring(3, 25, 1):
        one(engine, prompt)
    assert engine.stats().kv_host_bytes > 0
    engine.close()
    assert engine._kv.host._store is None


@settings(max_examples=25, deadline=None)
@given(
    which=st.integers(0, len(MODELS) - 1),
    order=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=2, max_size=8),
    stagger=st.integers(0, 2),
    kv_offload_bytes=st.sampled_from([20_000, 1_000_000]),
    slots=st.sampled_from([56, 80]),
    max_num_batched_tokens=st.sampled_from([5, 64]),
    late=st.booleans(),
)
def test_offloading_gives_the_same_tokens(
    which: int, order: list[int], stagger: int, slots: int, **config: Any
) -> None:
    expected: list[RequestOutput] = alone("reference", which, "bf16")
    engine = tiny_engine(model(which), "reference", eos_ids=EOS, slots=slots, **config)
    keeps_the_promise(engine, order, stagger, expected, False)
    assert is_empty(engine)


FEW: dict[str, st.SearchStrategy[Any]] = {
    "num_blocks": st.integers(9, 14),
    "block_size": st.sampled_from([2, 3]),
    "prefix_cache": st.just(True),
    "kv_offload_bytes": st.sampled_from([2, 10, 100]),
}
"""Of an engine whose blocks are enough for one of the prompts and little more."""


class OffloadedLife(Life):
    """The state machine of test_machine.py with prompts that recur."""

    @initialize(
        target_token_ms=st.just(0),
        seed=st.integers(0, 99),
        max_nodes=st.sampled_from([0, 6]),
        **SHAPES | FEW,
    )
    def start(self, seed: int, max_nodes: int, **config: Any) -> None:
        self.begin(Unruly(seed, VOCAB, self.truth, max_nodes), **config)

    @rule(stem=st.integers(0, 2), size=st.integers(14, 20), steps=st.integers(4, 12))
    def come_again(self, stem: int, size: int, steps: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        self.add(
            stem=stem, shared=size, rest=[STEMS[stem][0]], params=params, priority=0, salt=None
        )
        self.step(steps)


TestOffloadedLife = OffloadedLife.TestCase
TestOffloadedLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
