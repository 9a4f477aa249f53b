"""KV that survives a restart: later engines compute fewer rows, and give the same tokens."""

import gc
import shutil
import time
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headrace.backend_traits import traits_of
from headrace.engine.engine import Engine
from headrace.outputs import Update
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.test_adapters import adapter
from tests.engine.test_machine import SHAPES, STEMS, Life, Unruly
from tests.engine.test_offload import recurring
from tests.engine.test_prefix import one
from tests.engine.test_promise import model, same
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.families import VARIANTS, spec_of
from tests.kv.kills import kill_engines
from tests.tiny import random_tensors, tiny_engine, tiny_model

PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=5)


def run(engine: Engine, prompts: list[list[int]], options: RequestOptions | None = None) -> int:
    """Run prompts one by one, check their tokens, and return the number of cached tokens.

    The blocks of each are on the disk before the next.
    """
    for prompt in prompts:
        result = one(engine, prompt, PARAMS, options or RequestOptions())
        assert prompt + result.outputs[0].token_ids == plain_decoding(prompt, PARAMS, 0)
        if engine._kv.disk:
            engine._kv.disk.flush(10)
    return engine.stats().cached_tokens


@pytest.mark.parametrize("windows", [(0,), (0, 5), (6,)])
def test_a_later_engine_reads_the_blocks(windows: tuple[int, ...], tmp_path: Path) -> None:
    prompts = recurring(4, 25, 1)
    for expected in (0, 4 * 24, 4 * 24):
        engine = toy_engine(windows=windows, folder=tmp_path / "kv")
        assert run(engine, prompts) == expected
        engine._kv.check([])
        stats = engine.stats()
        assert bool(stats.disk_loaded_blocks) == bool(expected)
        engine.close()
        assert engine.stats().disk_dropped_blocks == 0


def test_evicted_blocks_are_read_again(tmp_path: Path) -> None:
    """Four prompts of six blocks in a cache of ten."""
    engine = toy_engine(num_blocks=10, folder=tmp_path / "kv")
    assert run(engine, recurring(4, 25, 3)) == 8 * 24
    assert engine.stats().disk_loaded_blocks > 0
    engine._kv.check([])


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """Each reads what the other wrote, within a bound that neither can hold all prompts in."""
    engines = [toy_engine(num_blocks=10, folder=tmp_path / "kv", max_bytes=4000) for _ in range(2)]
    for prompt in recurring(6, 25, 3):
        for engine in engines:
            run(engine, [prompt])
    for engine in engines:
        stats = engine.stats()
        assert stats.disk_loaded_blocks > 0 and stats.cached_tokens > 0
        engine._kv.check([])
        engine.close()
    used = sum(file.stat().st_size for file in tmp_path.rglob("*-?"))
    assert 0 < used <= 2 * 4000


def test_no_hit_with_another_salt_or_shape(tmp_path: Path) -> None:
    prompts = recurring(2, 25, 1)
    engine = toy_engine(folder=tmp_path / "kv")
    run(engine, prompts, RequestOptions(cache_salt="a"))
    engine.close()
    for salt in (None, "", "b"):
        engine = toy_engine(folder=tmp_path / "kv")
        assert run(engine, prompts, RequestOptions(cache_salt=salt)) == 0
        engine.close()
    assert run(toy_engine(folder=tmp_path / "kv", windows=(0, 0)), prompts) == 0
    engine = toy_engine(folder=tmp_path / "kv")
    assert run(engine, prompts, RequestOptions(cache_salt="a")) == 2 * 24


def test_a_damaged_block_shortens_the_hit(tmp_path: Path) -> None:
    (prompt,) = recurring(1, 25, 1)
    engine = toy_engine(folder=tmp_path / "kv")
    run(engine, [prompt])
    engine.close()
    oldest = sorted(tmp_path.rglob("*-0"), key=lambda path: -path.stat().st_mtime_ns)
    oldest[3].write_bytes(b"damaged")
    engine = toy_engine(folder=tmp_path / "kv")
    assert run(engine, [prompt]) == 12
    engine._kv.check([])
    engine.close()
    assert run(toy_engine(folder=tmp_path / "kv"), [prompt]) == 24, "it was written again"


def test_reading_is_skipped_if_it_is_slower(tmp_path: Path) -> None:
    (prompt,) = recurring(1, 25, 1)
    for _ in range(2):
        engine = toy_engine(folder=tmp_path / "kv")
        run(engine, [prompt])
        engine.close()
    disk = engine._kv.disk
    assert disk is not None and disk.is_faster and disk.num_loaded == 6
    disk._byte_seconds = 1.0
    assert not disk.is_faster
    disk._measured = -61.0
    assert disk.is_faster, "it is measured again after a minute"


@pytest.mark.parametrize("windows", [(0,), (0, 5), (6,)])
def test_a_long_hit_is_read_in_slices(
    windows: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running request gets a token in each step, before and after each slice."""
    monkeypatch.setattr("headrace.kv.disk._SLICE_BYTES", 1)
    (prompt,) = recurring(1, 25, 1)
    engine = toy_engine(windows=windows, folder=tmp_path / "kv")
    run(engine, [prompt])
    engine.close()

    engine = toy_engine(windows=windows, folder=tmp_path / "kv")
    long = SamplingParams(temperature=0.7, seed=2, max_tokens=30, ignore_eos=True)
    first = engine.add_request([1, 2], long)
    engine.step()
    second = engine.add_request(prompt, PARAMS)
    loaded, results = [0], {}
    while engine.has_work:
        updates = {update.request_id: update for update in engine.step()}
        if not results:
            assert len(updates[first].token_ids) == 1 or updates[first].result
        loaded.append(engine.stats().disk_loaded_blocks)
        results |= {name: update.result for name, update in updates.items() if update.result}
    assert np.diff(loaded).max() == 1 < loaded[-1]
    assert results[second].cached_tokens == 24
    for name, tokens, params in ((first, [1, 2], long), (second, prompt, PARAMS)):
        answer = results[name].outputs[0].token_ids
        assert tokens + answer == plain_decoding(tokens, params, 0)
    engine._kv.check([])
    engine.close()


def test_a_full_disk_stops_no_request(tmp_path: Path) -> None:
    engine = toy_engine(num_blocks=10, folder=tmp_path / "kv")
    run(engine, recurring(1, 25, 1))
    disk = engine._kv.disk
    assert disk is not None
    disk.flush(5)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("no folder")
    run(engine, recurring(4, 25, 2))
    engine.close()
    assert disk._folder.is_read_only


def test_a_thread_that_fails_stops_no_request(tmp_path: Path) -> None:
    engine = toy_engine(num_blocks=10, folder=tmp_path / "kv")
    disk = engine._kv.disk
    assert disk is not None

    def fails(*args: Any) -> None:
        raise RuntimeError

    disk._blocks.read = fails  # type: ignore[method-assign]
    run(engine, recurring(1, 25, 1))
    while disk._thread:
        time.sleep(0.01)
    assert disk._folder.is_read_only
    run(engine, recurring(4, 25, 2))
    engine.close()


@pytest.mark.parametrize("name", VARIANTS)
def test_all_families_read_the_same_bits(name: str, tmp_path: Path) -> None:
    """Each with two of the KV formats; windows, MLA and mixtures among them."""
    spec = spec_of(name)
    which = list(VARIANTS).index(name)
    prompt = np.random.default_rng(which).integers(3, spec.vocab_size, 110).tolist()
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, logprobs=3, ignore_eos=True)
    dtypes = traits_of("cpu").kv_dtypes
    tensors = random_tensors(spec, 1)
    for dtype in (dtypes[which % 5], dtypes[(which + 2) % 5]):
        options: dict[str, Any] = {"kv_dtype": dtype, "slots": 400}
        expected = one(tiny_engine((spec, tensors), "cpu", **options), prompt, params)
        for num_cached in (0, 96):
            engine = tiny_engine((spec, tensors), "cpu", folder=tmp_path / "kv", **options)
            result = one(engine, prompt, params)
            same(result, expected, exact=True)
            assert result.cached_tokens == num_cached
            assert bool(engine.stats().disk_loaded_blocks) == bool(num_cached)
            engine.close()


def test_adapters_have_kv_of_their_own(tmp_path: Path) -> None:
    """By their numbers: the name and the order of loading do not count."""
    prompt, params = list(range(3, 50)), SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    results: dict[int, Any] = {}
    for names in (("a", "b"), ("other", "a")):
        engine = tiny_engine(model(0), "cpu", folder=tmp_path / "kv")
        for number, name in enumerate(names):
            engine.load_adapter(name, adapter(0, number))
        for number, name in enumerate(names):
            result = one(engine, prompt, params, RequestOptions(adapter=name))
            same(result, results.setdefault(number, result), exact=True)
            assert result.cached_tokens == (0 if names[0] == "a" else 32)
        engine.close()
    engine = tiny_engine(model(0), "cpu", folder=tmp_path / "kv")
    assert one(engine, prompt).cached_tokens == 0
    engine.close()


@pytest.mark.parametrize("options", [{"attention_top_blocks": 2}, {"attention_window": 40}])
def test_lossy_modes_read_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """With chosen blocks, the bounds of keys are computed anew."""
    spec, tensors = tiny_model(3, context=512)
    prompt = np.random.default_rng(0).integers(3, 61, 300).tolist()
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=3)
    expected = one(tiny_engine((spec, tensors), "cpu", slots=600, **options), prompt, params)
    for num_cached in (0, 288):
        engine = tiny_engine((spec, tensors), "cpu", slots=600, folder=tmp_path / "kv", **options)
        result = one(engine, prompt, params)
        same(result, expected, exact=True)
        assert result.cached_tokens == num_cached
        engine.close()


def test_killed_engines_leave_no_wrong_hit(tmp_path: Path) -> None:
    """`make soak-kv` kills 2,000 of them."""
    assert kill_engines(tmp_path / "kv", num_kills=5) > 0


def test_a_tier_that_nobody_closes_lets_its_memory_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kv.disk._LINGER_SECONDS", 0.05)
    engine = tiny_engine(model(0), "cpu", folder=tmp_path / "kv")
    one(engine, list(range(3, 50)))
    assert engine._kv.disk
    tier = weakref.ref(engine._kv.disk)
    del engine
    for _ in range(200):
        gc.collect()
        if tier() is None:
            break
        time.sleep(0.05)
    assert tier() is None
    later = tiny_engine(model(0), "cpu", folder=tmp_path / "kv")
    assert one(later, list(range(3, 50))).cached_tokens == 32
    later.close()


class Restarted(Life):
    """The state machine of test_machine.py with prompts that recur, over engines that are closed,
    and followed by others over the same folder.
    """

    @initialize(
        target_token_ms=st.just(0),
        seed=st.integers(0, 99),
        max_nodes=st.sampled_from([0, 6]),
        max_bytes=st.sampled_from([1 << 30, 4000]),
        slice_bytes=st.sampled_from([1 << 30, 1]),
        **SHAPES
        | {
            "num_blocks": st.integers(9, 20),
            "block_size": st.sampled_from([2, 3]),
            "prefix_cache": st.just(True),
            "late": st.just(False),
        },
    )
    def start(self, seed: int, max_nodes: int, slice_bytes: int, **config: Any) -> None:
        self.slices = patch("headrace.kv.disk._SLICE_BYTES", slice_bytes)
        self.slices.start()
        self.folder = TemporaryDirectory()
        self.proposer = Unruly(seed, VOCAB, self.truth, max_nodes)
        self.begin(self.proposer, folder=Path(self.folder.name), **config)

    @rule(stem=st.integers(0, 2), size=st.integers(14, 20), steps=st.integers(4, 12))
    def come_again(self, stem: int, size: int, steps: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        self.add(
            stem=stem, shared=size, rest=[STEMS[stem][0]], params=params, priority=0, salt=None
        )
        self.step(steps)

    def _updates(self) -> list[Update]:
        """Wait for the disk after each step, so that a run can be repeated."""
        updates = super()._updates()
        assert self.engine._kv.disk
        self.engine._kv.disk.flush(10)
        return updates

    @rule()
    def restart(self) -> None:
        super().teardown()
        self.engine.close()
        for record in (self.truth, self.params, self.finished, self.vectors, self.prompt_lens):
            record.clear()
        self.begin(self.proposer, **self.config)

    @rule(where=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def damage(self, where: int, bit: int) -> None:
        files = sorted(Path(self.folder.name).rglob("*-?"))
        if files:
            file = files[where % len(files)]
            damaged = bytearray(file.read_bytes() or b"\0")
            damaged[where % len(damaged)] ^= 1 << bit
            file.write_bytes(damaged)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        super().teardown()
        self.engine.close()
        self.folder.cleanup()
        self.slices.stop()


TestRestarted = Restarted.TestCase
TestRestarted.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
