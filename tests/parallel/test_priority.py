"""Urgent requests preempt others on several ranks, and no request changes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput
from headrace.structured_outputs import StructuredOutputs
from tests.parallel.test_processes import load_adapter, models  # noqa: F401 - a fixture

OPTIONS: dict[str, Any] = {
    "adaptive_speculation": False,
    "kv_dtype": "int8",
    "kv_blocks": 40,
    "threads": 1,
    "max_num_seqs": 4,
    "chunked_prefill_size": 8,
    "max_num_batched_tokens": 16,
}
SHARED = [5, 6, 7, 8] * 9
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "logprobs": 1}
RUNNING: list[tuple[list[int], SamplingParams, str | None]] = [
    ([*SHARED, 9], SamplingParams(temperature=0, prompt_logprobs=1, **LONG), None),
    ([*SHARED, 3], SamplingParams(seed=1, n=2, **LONG), None),
    (
        [4, 5],
        SamplingParams(seed=2, structured_outputs=StructuredOutputs(regex="[a-m ]{300}"), **LONG),
        None,
    ),
    ([7, 8, 9], SamplingParams(seed=3, **LONG), "other"),
]
URGENT: list[tuple[list[int], SamplingParams, str | None]] = [
    ([*SHARED, 11], SamplingParams(seed=4, n=4, max_tokens=12, logprobs=1), None),
    (
        [12] * 30,
        SamplingParams(
            seed=5,
            n=3,
            max_tokens=20,
            structured_outputs=StructuredOutputs(choice=["abc", "abd", "xyz"]),
        ),
        None,
    ),
    ([13, 5], SamplingParams(beam_width=3, n=3, max_tokens=8), None),
    ([14, 5, 6], SamplingParams(seed=6, n=2, max_tokens=9, prompt_logprobs=0), "other"),
]


def ask(llm: LLM, asked: list[Any], priority: int = 0) -> list[Any]:
    prompts, params, adapters = zip(*asked, strict=True)
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(ids, list(params), adapter=list(adapters), priority=priority)
    return [bits(result) for result in results]


def bits(result: RequestOutput) -> Any:
    outputs = [(out.token_ids, out.text, out.logprobs, out.finish_reason) for out in result.outputs]
    return result.prompt_logprobs, outputs


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, list[Any]]:  # noqa: F811
    """The results of one rank, each request by itself."""
    found = {}
    for name, model in models.items():
        with LLM(model, **OPTIONS) as llm:
            load_adapter(llm, model)
            found[name] = [ask(llm, [asked])[0] for asked in RUNNING + URGENT]
    return found


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "proposer"),
    [("qwen3", 2, 1, "suffix"), ("qwen3", 1, 2, "off"), ("mixtral", 2, 1, "auto")],
)
def test_urgent_requests_preempt_on_ranks(
    models: dict[str, Path],  # noqa: F811
    alone: dict[str, list[Any]],
    name: str,
    tensor: int,
    pipeline: int,
    proposer: str,
) -> None:
    """Prompts in pieces, drafts, prefix cache, grammars, n > 1, adapters, scored prompts."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with LLM(models[name], proposer=proposer, **OPTIONS, **sizes) as llm:
        load_adapter(llm, models[name])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, llm, RUNNING, 2)
            urgent = []
            for asked in URGENT:
                before = llm.stats().steps
                while llm.stats().steps < before + 8:
                    assert not running.done()
                urgent += ask(llm, [asked], -2)
            assert not running.done()
            preemptions = llm.stats().preemptions
            assert running.result() + urgent == alone[name]
        stats = llm.stats()
    assert preemptions >= len(URGENT)
    assert stats.cached_tokens and stats.blocks_free == stats.blocks_total
