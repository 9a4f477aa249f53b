"""Ranks of the GPU backend as processes, over gloo, in Triton's interpreter: the results of one
rank with all features together, and after a rank is lost.

The gate runs two tensor-parallel ranks, `make test-triton` other meshes too.
"""

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.kv.host import HostTier
from headrace.parallel.executable import ParallelExecutable
from tests.backend.cuda.test_ranks import IS_LONG
from tests.parallel.test_processes import add_own_weights, children, save_with_tokenizer
from tests.test_adapters import write_adapter

Ask = tuple[list[int], dict[str, Any], str | None]

SHARED = [7, 8, 9, 10] * 16
"""A block of KV."""
REQUESTS: list[Ask] = [
    (SHARED, {"temperature": 0.0, "logprobs": 2}, None),
    ([*SHARED, 5], {"seed": 3, "temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 1}, None),
    ([5, 6] * 31, {"temperature": 0.0, "presence_penalty": 0.7, "logit_bias": {4: 2.0}}, "other"),
    ([9, 8, 7], {"seed": 1, "n": 2, "top_p": 0.9, "prompt_logprobs": 1}, None),
    ([3, 1, 4], {"beam_width": 2, "max_tokens": 3}, None),
]
SHORT: list[Ask] = [([6, 7, 8], {"temperature": 0.0, "max_tokens": 4}, "other")]
OPTIONS: dict[str, Any] = {
    "backend": "cuda",
    "kv_dtype": "int8",
    "kv_blocks": 4,
    "max_num_seqs": 3,
    "chunked_prefill_size": 32,
    "max_num_batched_tokens": 48,
    "adaptive_speculation": False,
    "proposer": "suffix",
}
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"pipeline_parallel_size": 2}),
    ("qwen3", {"tensor_parallel_size": 3, "enable_sequence_parallel": True}),
    ("qwen3", {"tensor_parallel_size": 2, "proposer": "self_draft", "draft_layers": 1}),
    ("qwen3", {"tensor_parallel_size": 2, "proposer": "off", "multi_step_ms": 1000}),
    ("mixtral", {"tensor_parallel_size": 2, "kv_dtype": "fp8"}),
    ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": False}),
    ("mixtral", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
]


pytestmark = pytest.mark.skipif(
    not is_interpreting() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, heads in (("qwen3", 128), ("mixtral", 64)):
        write_adapter(folder / f"{name}-adapter", 4, layers=(0, 1), heads=heads, dim=64)
        add_own_weights(folder / f"{name}-adapter" / "adapter_model.safetensors")
        save_with_tokenizer(name, folder / name)
    return folder


def open_llm(folder: Path, name: str, **options: Any) -> LLM:
    llm = LLM(folder / name, **{**OPTIONS, **options})
    llm.load_adapter("other", folder / f"{name}-adapter")
    return llm


def results(llm: LLM, asks: list[Ask] = REQUESTS) -> list[Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _, _ in asks],
        [
            SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **options})
            for _, options, _ in asks
        ],
        adapter=[adapter for _, _, adapter in asks],
    )
    return [
        [[(one.token_ids, one.logprobs) for one in output.outputs], output.prompt_logprobs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, "qwen3", tensor_parallel_size=2, kv_offload_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, "qwen3") as llm:
        yield llm


def executable_of(llm: LLM) -> ParallelExecutable:
    executable = llm._engine._loop.executable
    assert isinstance(executable, ParallelExecutable)
    return executable


def test_ranks_with_all_features(ranks: LLM, one: LLM) -> None:
    """Quantised KV in few blocks, drafts, prompt chunks, adapters, penalties and beams."""
    assert results(ranks) == results(one)
    assert ranks.stats().drafted


def test_pooled_rows_of_ranks(ranks: LLM, one: LLM) -> None:
    prompts = [{"prompt_token_ids": SHARED}, {"prompt_token_ids": [5]}]
    np.testing.assert_array_equal(ranks.embed(prompts), one.embed(prompts))


@pytest.mark.skipif(not IS_LONG, reason="part of make test-triton")
def test_host_blocks_of_ranks(ranks: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted blocks come back from the host memory of each rank."""
    monkeypatch.setattr(HostTier, "is_faster", True)
    asks: list[Ask] = [
        ([number, *SHARED], {"max_tokens": 1, "temperature": 0.0}, None) for number in range(3)
    ]
    for ask in (*asks, *asks):
        assert results(ranks, [ask]) == results(one, [ask])
    assert ranks._engine._kv.host.num_loaded


def kill_later(ranks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the other rank before the third launch."""
    rank = executable_of(ranks)._rank
    launch, numbers = rank.launch, count()

    def killing(*args: Any, **options: Any) -> Any:
        if next(numbers) == 2:
            os.kill(children()[0], signal.SIGKILL)
        return launch(*args, **options)

    monkeypatch.setattr(rank, "launch", killing)


def test_lost_ranks_restart(ranks: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results without meaning are dropped, and the adapters and host blocks are made again."""
    expected, before, failed = results(one, SHORT), children(), ranks.stats().failed_steps
    kill_later(ranks, monkeypatch)
    assert results(ranks, SHORT) == expected
    assert ranks.stats().failed_steps == failed + 1 and children() != before
    monkeypatch.undo()
    assert results(ranks, SHORT) == expected


@pytest.mark.skipif(not IS_LONG, reason="part of make test-triton")
@pytest.mark.parametrize(("name", "options"), MESHES)
def test_other_meshes_with_all_features(folder: Path, name: str, options: dict[str, Any]) -> None:
    alone = {key: options[key] for key in options if "parallel" not in key}
    with open_llm(folder, name, **options) as ranks:
        mine = results(ranks)
    with open_llm(folder, name, **alone) as one:
        assert mine == results(one)
