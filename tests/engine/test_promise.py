"""Promise 1: the same request gives the same tokens in any batch, with any chunks and any drafts.

`cpu` must be equal bit for bit, log-probabilities included. `reference` computes in float64 in an
order that depends on the batch, so its log-probabilities may differ in the last place.
"""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend_traits import KvDtype, traits_of
from headrace.engine.engine import Engine
from headrace.model.spec import ExpertSpec, MlaSpec, ModelSpec, RopeSpec
from headrace.outputs import Logprobs, RequestOutput
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import PROPOSERS, REQUIRED_OPTIONS
from tests.draft_engines import draft_engine
from tests.random_trees import RandomTrees
from tests.tiny import Tensors, drain, run_all, tiny_engine, tiny_model

BACKENDS = ["cpu", "reference"]
VOCAB = 61
EOS = (60,)

GEMMA: dict[str, Any] = {
    "qk_norm": "head",
    "activation": "gelu_tanh",
    "embedding_scale": 5.7,
    "attention_softcap": 5.0,
}
BIASED: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "gated_mlp": False,
}

MODELS: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": 1, "window": 6, "kv_heads": 4, "layers": 3},
    {"seed": 2, "kv_heads": 1, "format": "Q8_0"},
    {"seed": 3, "window": (6, 0), "layers": 3},
    {"seed": 4, "window": (9, 34), "layers": 4},
    {"seed": 5, "architecture": "qwen3", "qk_norm": "head"},
    {
        "seed": 6,
        "architecture": "gemma3",
        "window": (9, 9, 0),
        "layers": 4,
        "window_rope": RopeSpec(8, 100.0),
        **GEMMA,
    },
    {
        "seed": 7,
        "architecture": "gpt_neox",
        "block": "parallel_two_norms",
        "activation": "gelu",
        **BIASED,
    },
    {
        "seed": 8,
        "architecture": "bloom",
        "rope": None,
        "alibi_bias": 8.0,
        "embedding_norm": True,
        **BIASED,
    },
    {
        "seed": 9,
        "architecture": "qwen2_moe",
        "experts": ExpertSpec(8, 3, 32, normalised=False, shared_ffn_dim=32, shared_gate=True),
    },
    {
        "seed": 10,
        "architecture": "mixtral",
        "kv_heads": 4,
        "window": 7,
        "format": "Q4_0",
        "experts": ExpertSpec(4, 2, 64),
    },
    {
        "seed": 11,
        "architecture": "deepseek_v2",
        "rope": RopeSpec(4),
        "mla": MlaSpec(24, 12, query_rank=16, is_absorbed=True),
    },
]
"""Of Llama, and one each with norms of queries and keys, two rotary bases, a parallel block, ALiBi,
two kinds of experts, latent rows.
"""

Ask = tuple[list[int], SamplingParams]
REQUESTS: list[Ask] = [
    ([7, 8, 9, 7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=14, logprobs=3)),
    ([3], SamplingParams(seed=1, max_tokens=11, logprobs=0)),
    (
        list(range(1, 38)),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1),
    ),
    ([5, 4, 3, 2], SamplingParams(n=4, seed=2, max_tokens=9, logprobs=1, top_p=0.9)),
    (
        [9, 9, 9, 9, 9],
        SamplingParams(
            seed=3,
            max_tokens=12,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.3,
        ),
    ),
    (
        [1, 2],
        SamplingParams(
            temperature=0.6,
            seed=4,
            top_k=20,
            min_p=0.02,
            max_tokens=13,
            logit_bias={4: 3.0, 5: -100.0},
        ),
    ),
    (
        [20, 21, 22],
        SamplingParams(
            temperature=0,
            max_tokens=15,
            presence_penalty=2.0,
            stop=["a"],
            min_tokens=3,
            ignore_eos=True,
        ),
    ),
    (
        [2, 4] * 7,
        SamplingParams(
            n=2,
            seed=5,
            temperature=0.5,
            max_tokens=10,
            prompt_logprobs=0,
            stop_token_ids=[6, 7],
            min_tokens=2,
        ),
    ),
]


@cache
def model(which: int) -> tuple[ModelSpec, Tensors]:
    return tiny_model(**MODELS[which])


@cache
def alone(backend: str, which: int, kv_dtype: str) -> list[RequestOutput]:
    """Run each request by itself, in one piece, without drafts."""
    engine = tiny_engine(
        model(which),
        backend,
        eos_ids=EOS,
        kv_dtype=kv_dtype,
        prefix_cache=False,
        release_outside_window=False,
    )
    return [run_all(engine, [request])[0] for request in REQUESTS]


def truth(results: list[RequestOutput], order: list[int]) -> dict[tuple[int, int], list[int]]:
    """Return the expected tokens of each sequence if the requests are added in this order."""
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


def same_logprobs(
    a: list[Logprobs] | list[Logprobs | None],
    b: list[Logprobs] | list[Logprobs | None],
    exact: bool,
) -> None:
    for one, other in zip(a, b, strict=True):
        if exact or one is None or other is None:
            assert one == other
        else:
            assert list(one) == list(other)
            assert [v.logprob for v in one.values()] == pytest.approx(
                [v.logprob for v in other.values()], abs=1e-5
            )


LOADS: dict[str, st.SearchStrategy[Any]] = {
    "which": st.integers(0, len(MODELS) - 1),
    "order": st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=12),
    "stagger": st.integers(0, 3),
    "kv_dtype": st.sampled_from(traits_of("cpu").kv_dtypes),
    "max_num_batched_tokens": st.sampled_from([1, 2, 3, 5, 8, 17, 64]),
    "max_num_seqs": st.sampled_from([1, 2, 5, 32]),
    "max_logit_rows": st.sampled_from([1, 4, 64]),
    "chunked_prefill_size": st.sampled_from([1, 3, 32]),
    "multi_step_ms": st.sampled_from([0, 1e6]),
    "slots": st.sampled_from([42, 56, 80, 800]),
    "threads": st.sampled_from([1, 2, 5]),
    "prefix_cache": st.booleans(),
    "late": st.booleans(),
}
"""Which requests come to which model, how fast, and what the engine makes of them."""


def keeps_the_promise(
    engine: Engine,
    order: list[int],
    stagger: int,
    expected: list[RequestOutput],
    exact: bool,
    requests: list[Ask] = REQUESTS,
) -> None:
    """Serve the requests, `stagger` steps apart, and compare updates and results.

    In an odd number of requests every second one is more urgent, and may preempt.
    """
    updates, ids = [], []
    for number, request in enumerate(order):
        options = RequestOptions(priority=-(number % 2) * (len(order) % 2))
        ids.append(engine.add_request(*requests[request], options))
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
@settings(max_examples=100, deadline=None)
@given(
    drafts=st.sampled_from(
        [*(name for name in PROPOSERS if name not in REQUIRED_OPTIONS), "trees", "wide trees"]
    ),
    seed=st.integers(0, 1000),
    **LOADS,
)
def test_same_request_same_tokens(
    backend: str,
    which: int,
    order: list[int],
    kv_dtype: str,
    drafts: str,
    seed: int,
    stagger: int,
    **config: Any,
) -> None:
    expected = alone(backend, which, kv_dtype)
    nodes = {"trees": 9, "wide trees": 70}.get(drafts)
    proposer = RandomTrees(seed, VOCAB, truth(expected, order), nodes) if nodes else drafts
    engine = tiny_engine(
        model(which), backend, proposer=proposer, eos_ids=EOS, kv_dtype=kv_dtype, **config
    )
    keeps_the_promise(engine, order, stagger, expected, exact=backend == "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_outside_all_windows_are_released(backend: str) -> None:
    """A long output holds only the blocks of its window, so it fits next to others."""
    made = tiny_model(3, window=40)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, logprobs=1, ignore_eos=True)
    results = []
    for release_outside_window in (True, False):
        engine = tiny_engine(
            made, backend, kv_dtype="f32", release_outside_window=release_outside_window, slots=512
        )
        engine.add_request([1, 2, 3, 4, 5], params)
        updates, most = [], 0
        while engine.has_work:
            updates += engine.step()
            most = max(most, engine.stats().blocks_used)
        size = engine.limits.kv.block_size
        assert most == -(-104 // size) if not release_outside_window else most <= -(-40 // size) + 1
        results.append(updates[-1].result)
    assert results[0] and results[1]
    same(results[0], results[1], exact=backend == "cpu")


INTERLEAVED = tiny_model(3, dim=64, layers=5, window=(0, 40, 40), context=512)


@pytest.mark.parametrize("kv_dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("backend", BACKENDS)
def test_window_layers_hold_only_visible_blocks(backend: str, kv_dtype: KvDtype) -> None:
    """Checks the blocks and bytes of each group in every step, inside a long prompt and after
    it.
    """
    engine = tiny_engine(
        INTERLEAVED, backend, slots=512, kv_dtype=kv_dtype, max_num_batched_tokens=24
    )
    engine.add_request(
        [token % VOCAB for token in range(300)],
        SamplingParams(max_tokens=60, seed=1, ignore_eos=True),
    )
    size = engine.limits.kv.block_size
    width = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1.25, "int4": 1.25, "k8v4": 1.25}[
        kv_dtype
    ]  # bytes of a number, with scales, and of padding at int4
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        full, windowed = stats.kv
        if not engine.has_work:
            break
        (seq,) = engine._scheduler.running
        rows = stats.rows_last
        written = range(max(0, seq.computed - rows + 1 - 40), seq.computed)
        assert full.blocks_used == -(-(300 if seq.computed < 300 else seq.computed) // size)
        touched = len({token // size for token in written})
        assert (
            windowed.blocks_used == touched
            if rows == 1
            else windowed.blocks_used <= -(-(40 + 24 - 2) // size) + 1
        )
        assert (
            stats.kv_bytes_used
            == full.blocks_used * full.block_bytes + windowed.blocks_used * windowed.block_bytes
        )
        assert [full.block_bytes, windowed.block_bytes] == [
            2 * 2 * 16 * layers * width * size for layers in (2, 3)
        ]
    assert stats.kv_bytes_used == 0


def searching(order: list[int]) -> list[tuple[list[int], SamplingParams]]:
    """Return requests with a common prefix, some with several sequences or beams."""
    stem = [token % VOCAB for token in range(90)]
    params = [
        SamplingParams(temperature=0, max_tokens=160, logprobs=1, ignore_eos=True),
        SamplingParams(seed=5, n=3, max_tokens=30, logprobs=1, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=20, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=1),
    ]
    return [(stem[: 90 - 25 * (i % 3)] + [i] * (1 + 7 * i % 40), params[i % 4]) for i in order]


@cache
def seeing_everything(backend: str) -> list[RequestOutput]:
    """Run each request by itself in an engine that keeps all KV and masks it."""
    engine = tiny_engine(
        INTERLEAVED,
        backend,
        slots=2048,
        kv_dtype="f32",
        prefix_cache=False,
        release_outside_window=False,
    )
    return [run_all(engine, [request])[0] for request in searching(list(range(8)))]


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7, "multi_step_ms": 1e6},
    "late results": {"late": True, "multi_step_ms": 1e6},
    "preemption": {"slots": 400, "max_num_batched_tokens": 40},
    "static": {"batching": "static", "slots": 1400},
    "suffix tree": {"proposer": "suffix"},
    "draft model": {
        "how": "draft_model",
        "draft": tiny_model(3, dim=64, layers=5, window=(40, 9), context=512),
    },
    "first layers": {"how": "self_draft", "layers": range(2)},
    "Medusa": {"how": "medusa"},
}


@pytest.mark.parametrize(
    ("backend", "how"),
    [*(("cpu", how) for how in HOW), ("reference", "plain"), ("reference", "preemption")],
)
def test_released_blocks_are_never_read(backend: str, how: str) -> None:
    options = {"slots": 1024, "kv_dtype": "f32", **HOW[how]}
    engine = (
        draft_engine(INTERLEAVED, backend=backend, **options)[0]
        if "how" in options
        else tiny_engine(INTERLEAVED, backend, **options)
    )
    for order in (
        [0, 4, 1, 5, 3, 7, 2, 6],
        [5, 0, 3, 6],
        [2],
    ):  # the second round hits the cache
        for result, which in zip(run_all(engine, searching(order)), order, strict=True):
            same(result, seeing_everything(backend)[which], exact=backend == "cpu")
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and stats.proposer_failures == 0
    assert stats.cached_tokens > 0 and (stats.preemptions > 0) == (how == "preemption")
    assert (stats.drafted > 0) == (how in ("suffix tree", "draft model", "first layers", "Medusa"))


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
def test_preemption_gives_the_same_tokens(backend: str) -> None:
    expected = alone(backend, 0, "f32")
    engine = tiny_engine(
        model(0), backend, slots=42, eos_ids=EOS, kv_dtype="f32"
    )  # enough for the longest request alone
    for i, result in enumerate(run_all(engine, REQUESTS * 3)):
        same(result, expected[i % len(REQUESTS)], exact=backend == "cpu")
    assert engine.stats().preemptions > 0
