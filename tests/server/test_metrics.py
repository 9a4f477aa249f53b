"""`GET /metrics`: our names and vLLM's, from real requests."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import Running, running, until

PROMPT = "hello hello"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "request_success",
)
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
)


@pytest.fixture(scope="module")
def counted(model: str) -> Iterator[Running]:
    """A server after known requests."""
    flags = ("--threads", "1", "--kv-blocks", "512", "--proposer", "suffix")
    for server in running(model, *flags, "--model-name", 'a "model"'):
        assert server.post("/v1/completions", BODY | {"max_tokens": 9}).status == 200
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "n": 2}
        assert server.post("/v1/chat/completions", chat | {"ignore_eos": True}).status == 200
        assert server.post("/v1/embeddings", {"input": PROMPT}).status == 200
        left = server.open_stream(
            "/v1/completions", BODY | {"max_tokens": 3000, "stream": True, "n": 4, "temperature": 1}
        )
        received = b""
        while b"choices" not in received:  # it has its first token
            received += left.recv(1000)
        left.close()
        until(server.at_rest)
        yield server


@pytest.fixture(scope="module")
def samples(counted: Running) -> dict[str, dict[str, float]]:
    """Values by sample name and labels, without the labels of the server."""
    until(lambda: 'finished_reason="abort",model_name="a \\"model\\"",version' in _text(counted))
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(_text(counted)):
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "model"', sample
            extra = "version" if sample.name.startswith("headrace_") else "engine"
            assert sample.labels[extra] == {"version": version("headrace"), "engine": "0"}[extra]
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", extra)}
            found.setdefault(sample.name, {})[",".join(rest.values())] = sample.value
    return found


def _text(server: Running) -> str:
    return server.get("/metrics").body.decode()


def test_names_of_vllm(samples: dict[str, dict[str, float]]) -> None:
    for name in HISTOGRAMS:
        for suffix in ("_bucket", "_sum", "_count"):
            assert f"vllm:{name}{suffix}" in samples
        assert samples[f"vllm:{name}_count"][""] > 0, name
    for name in COUNTERS:
        assert f"vllm:{name}_total" in samples
    for name in GAUGES:
        assert f"vllm:{name}" in samples
    (config,) = samples["vllm:cache_config_info"]
    assert "512" in config.split(",")


def test_values_are_those_of_the_requests(samples: dict[str, dict[str, float]]) -> None:
    finished = samples["vllm:request_success_total"]
    assert (finished["length"], finished["stop"], finished["abort"]) == (3, 1, 1)
    assert samples["headrace_requests_total"] == {"completed": 3, "aborted": 1, "error": 0}
    assert samples["vllm:request_generation_tokens_sum"][""] == 9 + 2 * 5
    assert samples["vllm:request_generation_tokens_count"][""] == 3
    assert samples["vllm:request_max_num_generation_tokens_sum"][""] == 9 + 5
    assert samples["vllm:request_params_n_sum"][""] == 1 + 2
    assert samples["vllm:request_params_max_tokens_sum"][""] == 9 + 5
    total = samples["vllm:generation_tokens_total"][""]
    assert total > 19 and total == samples["headrace_generated_tokens_total"][""]

    def sums(name: str) -> float:
        return samples[f"vllm:request_{name}_time_seconds_sum"][""]

    detokenise = samples["headrace_detokenise_seconds_sum"][""]
    assert sums("inference") == pytest.approx(sums("prefill") + sums("decode") + detokenise)
    assert sums("inference") + sums("queue") <= samples["vllm:e2e_request_latency_seconds_sum"][""]
    assert samples["vllm:time_to_first_token_seconds_count"][""] == 3  # no embedding
    # An accepted draft brings several tokens with one interval.
    assert 0 < samples["vllm:inter_token_latency_seconds_count"][""] <= total - 3


def test_each_series_has_a_help_text_and_a_type(counted: Running) -> None:
    text = _text(counted)
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    assert families == set(helps)
    assert all(re.fullmatch(r"[A-Z].{5,}\.", told) for told in helps.values()), helps
