"""Draft models on the default model: bit-equal to plain decoding, with the expected acceptance."""

from typing import Any

import pytest

from headrace import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
    "word " * 150,
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=0.9, top_p=0.95, seed=3, n=2, max_tokens=16, logprobs=0, presence_penalty=0.5
    ),
]
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "kv_blocks": 40,
    "max_num_batched_tokens": 64,
    "adaptive_speculation": False,
    "threads": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "itself": {"proposer": "draft_model", "draft_model": "smollm2"},
    "its first layers": {"proposer": "self_draft", "draft_layers": 26, "draft_width": 2},
    "in int8": {"proposer": "self_draft", "draft_layers": 20, "kv_dtype": "int8"},
}


@pytest.mark.parametrize("way", WAYS)
def test_draft_models_give_the_same_tokens(way: str) -> None:
    options = OPTIONS | WAYS[way]
    plain = {
        name: value for name, value in options.items() if name == "kv_dtype" or name in OPTIONS
    }
    requests = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    with LLM("smollm2", **plain) as llm:
        expected = llm.generate(
            [prompt for prompt, _ in requests], [params for _, params in requests]
        )
    with LLM("smollm2", **options) as llm:
        results = llm.generate(
            [prompt for prompt, _ in requests], [params for _, params in requests]
        )
        stats = llm.stats()
    assert [result.outputs for result in results] == [result.outputs for result in expected]
    assert stats.accepted > 0 and stats.proposer_failures == 0
    assert (stats.accepted == stats.drafted) == (way == "itself")
