"""Engine options: defaults, presets, and messages for invalid values."""

from typing import Any

import pytest

from headrace.config import INTERACTIVE, OFFLINE, EngineConfig
from headrace.errors import RequestError
from headrace.loader.options import engine_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean max_model_len?"),
        ({"backend": "gpu"}, "backend must be one of auto, cpu, cuda, reference, not 'gpu'"),
        ({"proposer": "nrgam"}, "proposer must be one of off, auto, suffix, jacobi"),
        ({"proposer": "ngram"}, "proposer 'ngram' was replaced by 'suffix', which drafts from"),
        ({"proposer": "online"}, "set proposer to suffix"),
        (
            {"draft_model": "smollm2"},
            "draft_model is for proposer 'draft_model' or 'auto', and proposer is 'off'",
        ),
        ({"proposer": "suffix", "draft_layers": 2}, "draft_layers is for proposer 'self_draft'"),
        ({"draft_width": 0}, "draft_width must be a whole number from 1"),
        (
            {"acceptance_method": "likely"},
            "acceptance_method must be one of exact, rejection, typical",
        ),
        (
            {"acceptance_method": "typical"},
            "acceptance_method 'typical' verifies drafts, and proposer is 'off'",
        ),
        (
            {"proposer": "suffix", "acceptance_method": "rejection"},
            "needs chains that a model has sampled",
        ),
        (
            {"proposer": "auto", "acceptance_method": "rejection"},
            "needs chains that a model has sampled",
        ),
        (
            {
                "proposer": "self_draft",
                "draft_layers": 1,
                "draft_width": 2,
                "acceptance_method": "rejection",
            },
            "draft_width 1",
        ),
        ({"max_draft_tokens": 0}, "max_draft_tokens must be a whole number from 1"),
        ({"adaptive_speculation": "no"}, "adaptive_speculation must be true or false, not 'no'"),
        ({"kv_dtype": "int3"}, "kv_dtype must be one of auto, bf16, f16, f32, fp8, int8, int4"),
        ({"backend": ["cpu"]}, "backend must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1"),
        ({"threads": -1}, "threads"),
        ({"chunked_prefill_size": -1}, "chunked_prefill_size must be a whole number from 0"),
        ({"prefix_cache": 1}, "prefix_cache must be true or false, not 1"),
        ({"target_token_ms": -1}, "target_token_ms must be a number from 0"),
        ({"seed": 0.5}, "seed"),
        ({"multi_step_ms": float("nan")}, "multi_step_ms must be a number from 0"),
        ({"batching": "dynamic"}, "batching must be one of inflight, static, not 'dynamic'"),
        ({"draft_model": 5, "proposer": "auto"}, "draft_model must be text, not 5"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    for preset in (OFFLINE, INTERACTIVE) if "proposer" in options else (OFFLINE,):
        with pytest.raises(RequestError) as error:
            engine_config(options, preset)
        assert message in str(error.value)


def test_options_override_the_preset() -> None:
    assert engine_config({}) == EngineConfig()
    assert engine_config({"seed": 3}) == EngineConfig(seed=3)
    config = engine_config({"multi_step_ms": 0, "threads": 1}, OFFLINE)
    assert (config.multi_step_ms, config.threads, config.chunked_prefill_size) == (0, 1, 0)
    assert engine_config({"proposer": "off"}, INTERACTIVE) == EngineConfig(max_num_seqs=1)


def test_chunk_size_defaults_to_step_size_offline() -> None:
    for options, expected in (
        ({}, 512),
        ({"max_num_batched_tokens": 64}, 64),
        ({"chunked_prefill_size": 7}, 7),
    ):
        assert engine_config(options, OFFLINE).max_chunk_rows == expected
    assert engine_config({}).max_chunk_rows == 16
