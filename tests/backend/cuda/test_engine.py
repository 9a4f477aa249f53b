"""The engine on the GPU backend: the tokens of the reference, and promise 1, to the bit."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.cuda import compile, executable, ticket
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.launch import Launch
from headrace.config import KvConfig
from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from tests.backend.cuda.examples import examples
from tests.backend.cuda.late import LateStream
from tests.engine.test_promise import Ask, keeps_the_promise, model, same, truth
from tests.random_trees import RandomTrees
from tests.tiny import run_all, tiny_engine

EOS = (60,)
VOCAB = 61
LLAMA, WINDOWS, GEMMA, BLOOM, EXPERTS, LATENT = 2, 3, 6, 8, 10, 11
"""One model of each family in test_promise.py: Q8_0, two kinds of windows, soft-caps and
norms of queries, ALiBi, experts, MLA.
"""
NEAR_TIE = 0.2
"""Max gap of log-probabilities at which the GPU may choose the other token."""
FAMILIES = [LLAMA, WINDOWS, GEMMA, BLOOM, EXPERTS, LATENT]

REQUESTS: list[Ask] = [
    ([7, 8, 9, 7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=7, logprobs=2)),
    ([5, 4, 3], SamplingParams(n=2, seed=2, max_tokens=6, logprobs=0, top_p=0.9)),
    (list(range(1, 22)), SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)),
    (
        [9, 9],
        SamplingParams(
            seed=3,
            max_tokens=6,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            top_k=30,
        ),
    ),
]


@cache
def alone(which: int, kv_dtype: str, activations: str) -> list[RequestOutput]:
    """Each request in an engine of its own, in one piece, without drafts."""
    engine = tiny_engine(
        model(which),
        "cuda",
        eos_ids=EOS,
        kv_dtype=kv_dtype,
        activations=activations,
        prefix_cache=False,
    )
    return [run_all(engine, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize("which", FAMILIES)
def test_tokens_are_those_of_the_reference(which: int) -> None:
    """Weights, activations and KV are float32."""
    reference = tiny_engine(model(which), "reference", eos_ids=EOS, kv_dtype="f32", slots=800)
    for one, other in zip(alone(which, "f32", "f32"), run_all(reference, REQUESTS), strict=True):
        assert [output.token_ids for output in one.outputs] == [
            output.token_ids for output in other.outputs
        ]
        for mine, its in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            if mine and its:
                assert [v.logprob for v in mine.values()] == pytest.approx(
                    [v.logprob for v in its.values()], abs=1e-3
                )


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("which", [LLAMA, GEMMA])
def test_tokens_in_other_formats_differ_only_at_near_ties(which: int, kv_dtype: str) -> None:
    """Activations are bf16 here and float64 in the reference, over the same weights and
    KV format.
    """
    one, other = (
        run_all(tiny_engine(model(which), backend, eos_ids=EOS, kv_dtype=kv_dtype), REQUESTS[:1])[
            0
        ].outputs[0]
        for backend in ("cuda", "reference")
    )
    for mine, its, described in zip(
        one.token_ids, other.token_ids, other.logprobs or [], strict=False
    ):
        best, second = (value.logprob for value in list(described.values())[:2])
        if mine != its:
            assert best - second < NEAR_TIE
            break


@settings(max_examples=examples(3), deadline=None)
@given(
    which=st.sampled_from(FAMILIES),
    how=st.sampled_from([("f32", "f32"), ("bf16", "int8"), ("int8", "int8"), ("fp8", "int8")]),
    order=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=2, max_size=4),
    stagger=st.integers(0, 2),
    drafts=st.sampled_from(["off", "suffix", "trees"]),
    slots=st.sampled_from([56, 200]),
    max_num_batched_tokens=st.sampled_from([5, 64]),
    prefix_cache=st.booleans(),
    late=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_same_request_same_tokens(
    which: int,
    how: tuple[str, str],
    order: list[int],
    stagger: int,
    drafts: str,
    late: bool,
    seed: int,
    **config: Any,
) -> None:
    kv_dtype, activations = how
    expected = alone(which, kv_dtype, activations)
    proposer = RandomTrees(seed, VOCAB, truth(expected, order), 6) if drafts == "trees" else drafts
    options = {
        "eos_ids": EOS,
        "kv_dtype": kv_dtype,
        "activations": activations,
        "proposer": proposer,
        **config,
    }
    engine = tiny_engine(model(which), "cuda", late=late, **options)
    keeps_the_promise(engine, order, stagger, expected, True, REQUESTS)


def late_engine(which: int, prepared: bool, **config: Any) -> tuple[Engine, LateStream]:
    """An engine on a late device, with graphs of its steps if prepared."""
    spec, tensors = model(which)
    stream = LateStream()
    program = trace_model(spec, tensors).with_pooled()
    kv = KvConfig((60,) * len(program.kv_groups), 4, "bf16")
    executable = CudaExecutable(program, tensors, kv, torch.bfloat16, stream)
    if prepared:
        executable.prepare(24, 4)
    return tiny_engine(
        model(which), "cuda", executable=executable, eos_ids=EOS, slots=240, **config
    ), stream


@pytest.mark.parametrize("multi_step_ms", [0, 1e6])
def test_graphs_and_late_results_change_no_token(multi_step_ms: float) -> None:
    expected = alone(WINDOWS, "bf16", "int8")
    engine, stream = late_engine(WINDOWS, prepared=True, multi_step_ms=multi_step_ms)
    keeps_the_promise(engine, [0, 1, 3, 2], 1, expected, True, REQUESTS)
    assert stream.late > 10 and stream.captured >= 3 and stream.replayed >= 3


def test_requests_meet_only_kernels_that_prepare_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel and its constants, in steps without drafts, masks and adapters."""
    prepared: list[Launch] = []
    monkeypatch.setattr(executable, "compile_kernels", lambda launches: prepared.extend(launches))
    engine, _ = late_engine(LLAMA, prepared=True, max_num_batched_tokens=20)

    def kinds(launches: Iterable[Launch]) -> set[str]:
        return {f"{launch.name} {launch.constants}" for launch in launches}

    run: list[Launch] = []
    runs = LateStream.run
    monkeypatch.setattr(LateStream, "run", lambda self, ls: (run.extend(ls), runs(self, ls)))
    run_all(engine, REQUESTS)
    assert len(kinds(run)) > 15 and kinds(run) <= kinds(prepared)
    assert "sample_filter_kernel" in " ".join(kinds(run))


def test_more_launches_in_flight_than_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Multi-step decoding launches repeatedly before it reads."""
    monkeypatch.setattr(ticket, "MAX_SLOTS", 3)
    ask = [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))]
    expected = run_all(tiny_engine(model(LLAMA), "cuda", eos_ids=EOS, kv_dtype="bf16"), ask)
    engine, _ = late_engine(LLAMA, prepared=False, multi_step_ms=1e6)
    assert run_all(engine, ask)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    launched = engine._loop.executable
    assert isinstance(launched, CudaExecutable)
    assert launched._slots._number == len(launched._slots._free) == 3


def test_frequent_prompt_chunks_become_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "_RUNS_BEFORE_GRAPH", 2)
    monkeypatch.setattr(executable, "_MAX_LATE_GRAPHS", 1)
    asks = [
        ([1, 2, 3, 4, i], SamplingParams(temperature=0.0, max_tokens=2, logprobs=1))
        for i in range(5)
    ]
    engine, stream = late_engine(
        LLAMA, prepared=False, prefix_cache=False, max_num_batched_tokens=5
    )
    expected = run_all(tiny_engine(model(LLAMA), "cuda", eos_ids=EOS, kv_dtype="bf16"), asks)
    for ask, one in zip(asks, expected, strict=True):
        same(run_all(engine, [ask])[0], one, exact=True)
    assert stream.captured == 2 and stream.replayed >= 3  # of one shape, and of its draws


def test_repeated_steps_allocate_no_memory() -> None:
    """Graphs launch launches on the same tensors."""
    engine, _ = late_engine(LLAMA, prepared=True)
    launched = engine._loop.executable
    assert isinstance(launched, CudaExecutable)
    before = (
        {shape: id(plan) for shape, plan in launched._plans.items()},
        launched._workspace.nbytes,
    )
    run_all(engine, [REQUESTS[0], REQUESTS[1]])
    after = (
        {shape: id(plan) for shape, plan in launched._plans.items() if shape in before[0]},
        launched._workspace.nbytes,
    )
    assert before == after


def test_beams_and_lossy_drafts_read_logits_on_the_host() -> None:
    for terms, config in (
        ({"beam_width": 2, "max_tokens": 4}, {}),
        ({"seed": 1, "max_tokens": 5}, {"acceptance_method": "rejection", "proposer": "suffix"}),
    ):
        asks = [
            ([1, 2, 3, 1, 2], SamplingParams(**terms)),
            ([4, 5], SamplingParams(temperature=0, max_tokens=3)),
        ]
        one, other = (
            run_all(
                tiny_engine(
                    model(LLAMA), backend, eos_ids=EOS, kv_dtype="f32", activations="f32", **config
                ),
                asks,
            )
            for backend in ("cuda", "reference")
        )
        for a, b in zip(one, other, strict=True):
            assert [output.token_ids for output in a.outputs] == [
                output.token_ids for output in b.outputs
            ]


def test_unsupported_kv_dtype_raises() -> None:
    spec, tensors = model(LLAMA)
    with pytest.raises(
        RequestError,
        match="kv_dtype 'int4' is not supported on cuda; choose bf16, f16, f32, fp8 or int8",
    ):
        compile(trace_model(spec, tensors), tensors, KvConfig((4,), 32, "int4"), 1)
