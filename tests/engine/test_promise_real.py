"""Promise 1 on the default model: bit-equal tokens and log-probabilities in any batch and with any
chunks.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.backend import Executable, compile_program
from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.proposer import Proposer
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import PROPOSERS, REQUIRED_OPTIONS, make_proposers
from tests.engine.test_promise import same, truth
from tests.random_trees import RandomTrees
from tests.tiny import run_all

KV = KvConfig((128,))
PROMPTS: list[tuple[str, SamplingParams]] = [
    ("The capital of France is", SamplingParams(temperature=0, max_tokens=24, logprobs=2)),
    (
        "Repeat after me: one two three four. One two three four. One two",
        SamplingParams(temperature=0, max_tokens=24, logprobs=0),
    ),
    (
        "Once upon a time",
        SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=20, logprobs=1),
    ),
    (
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
        SamplingParams(seed=4, n=2, max_tokens=16, logprobs=0, prompt_logprobs=1),
    ),
    (
        "word " * 300,
        SamplingParams(temperature=0, max_tokens=12, logprobs=0, repetition_penalty=1.2),
    ),
]


@cache
def checkpoint() -> tuple[Checkpoint, Tokenizer]:
    checkpoint = open_checkpoint(resolve("smollm2", progress=False))
    return checkpoint, checkpoint.load_tokenizer()


@pytest.fixture(scope="module")
def executables() -> Iterator[dict[int, Executable]]:
    """The model on one thread, on two, and on more than most test machines have."""
    model, _ = checkpoint()
    made = {
        n: compile_program("cpu", trace_model(model.spec, model.tensors), model.tensors, KV, n)
        for n in (1, 2, 8)
    }
    yield made
    for executable in made.values():
        executable.close()


def engine_on(
    executable: Executable, trees: Proposer | None = None, num_blocks: int = 128, **config: Any
) -> Engine:
    model, tokenizer = checkpoint()
    limits = EngineLimits(
        model.spec.vocab_size, 1024, replace(KV, num_blocks=(num_blocks,)), executable.kv_groups
    )
    options = EngineConfig(**config)
    return Engine(
        executable,
        tokenizer,
        limits,
        options,
        {"trees": trees} if trees else make_proposers(options),
    )


def requests() -> list[tuple[list[int], SamplingParams]]:
    tokenizer = checkpoint()[1]
    return [(tokenizer.encode(text), params) for text, params in PROMPTS]


@pytest.fixture(scope="module")
def alone(executables: dict[int, Executable]) -> list[RequestOutput]:
    """Run each request by itself, in one piece, on two threads, without drafts."""
    return [
        run_all(engine_on(executables[2], prefix_cache=False, multi_step_ms=0), [request])[0]
        for request in requests()
    ]


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    order=st.permutations(range(len(PROMPTS))),
    neighbours=st.sampled_from([0, 1, 31]),
    threads=st.sampled_from([1, 2, 8]),
    drafts=st.sampled_from(
        [*(name for name in PROPOSERS if name not in REQUIRED_OPTIONS), "trees"]
    ),
    control=st.booleans(),
    max_num_batched_tokens=st.sampled_from([7, 32, 100, 512]),
    num_blocks=st.sampled_from([14, 40, 128]),
    chunked_prefill_size=st.sampled_from([5, 32]),
    multi_step_ms=st.sampled_from([0, 10, 1e6]),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 99),
)
def test_same_request_same_tokens(
    executables: dict[int, Executable],
    alone: list[RequestOutput],
    order: list[int],
    neighbours: int,
    threads: int,
    drafts: str,
    control: bool,
    seed: int,
    **config: float,
) -> None:
    vocab = checkpoint()[0].spec.vocab_size
    trees = RandomTrees(seed, vocab, truth(alone, order)) if drafts == "trees" else None
    engine = engine_on(
        executables[threads],
        trees,
        proposer="off" if trees else drafts,
        adaptive_speculation=control,
        **config,
    )
    rng = np.random.default_rng(seed)
    crowd = [
        (rng.integers(0, vocab, rng.integers(1, 40)).tolist(), SamplingParams(seed=i, max_tokens=8))
        for i in range(neighbours)
    ]
    results = run_all(engine, [requests()[i] for i in order] + crowd)
    for result, which in zip(results, order, strict=False):
        same(result, alone[which], exact=True)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and stats.proposer_failures == 0


def test_preemption_gives_the_same_tokens(
    executables: dict[int, Executable], alone: list[RequestOutput]
) -> None:
    engine = engine_on(
        executables[2], num_blocks=8, max_num_seqs=32
    )  # equal requests share their blocks
    longer = [
        (tokens, replace(params, max_tokens=90, ignore_eos=True))
        for tokens, params in requests()[:3]
    ] * 3
    apart = [run_all(engine_on(executables[2]), [request])[0] for request in longer[:3]]
    for i, result in enumerate(run_all(engine, longer)):
        same(result, apart[i % 3], exact=True)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("dtype", ["int8", "int4", "k8v4"])
def test_quantised_kv_gives_the_same_tokens_in_any_batch(dtype: KvDtype) -> None:
    model, _ = checkpoint()
    kv = replace(KV, dtype=dtype)
    executable = compile_program(
        "cpu", trace_model(model.spec, model.tensors), model.tensors, kv, 2
    )
    expected = [run_all(engine_on(executable), [request])[0] for request in requests()]
    trees = RandomTrees(1, model.spec.vocab_size, truth(expected, list(range(len(PROMPTS)))))
    for result, one in zip(
        run_all(engine_on(executable, trees, num_blocks=14, max_num_batched_tokens=40), requests()),
        expected,
        strict=True,
    ):
        same(result, one, exact=True)
    executable.close()


def test_right_drafts_save_steps(executables: dict[int, Executable]) -> None:
    """The first prompt's continuation soon repeats itself."""
    tokens, params = requests()[0]
    request = (tokens, replace(params, max_tokens=64, ignore_eos=True))
    (plain,) = run_all(engine_on(executables[2]), [request])
    engine = engine_on(executables[2], proposer="suffix", adaptive_speculation=False)
    same(run_all(engine, [request])[0], plain, exact=True)
    assert engine.stats().accepted >= 16
