from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.model.rope import inverse_frequencies
from headrace.model.spec import RopeSpec

CASES: list[tuple[RopeSpec, dict[str, Any]]] = [
    (RopeSpec(64, 10000.0, "linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        RopeSpec(128, 500000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        RopeSpec(64, 500000.0, "llama3", 32.0, 64, low_freq_factor=1.0, high_freq_factor=2.0),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    ),
    (
        RopeSpec(128, 1000000.0, "yarn", 4.0, 32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        RopeSpec(
            64,
            10000.0,
            "yarn",
            16.0,
            256,
            beta_fast=24.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=0.7,
        ),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
        }
        | {"truncate": False, "attention_factor": 0.7},
    ),
    (
        RopeSpec(64, 10000.0, "yarn", 40.0, 4096, mscale=0.7, mscale_all_dim=1.1),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ),
    (
        RopeSpec(4, 10000.0, "yarn", 2.0, 8),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), CASES)
def test_rope_scaling_equals_transformers(rope: RopeSpec, parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=4 * rope.dim,
        num_attention_heads=4,
        max_position_embeddings=1 << 17,
        rope_parameters=parameters | {"rope_theta": rope.theta},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    frequencies, scale = inverse_frequencies(rope, 1 << 17, 1 << 17)
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, expected.double().numpy(), rtol=2e-6)
    assert scale == pytest.approx(factor)


def test_rope_without_scaling() -> None:
    frequencies, scale = inverse_frequencies(RopeSpec(8, 10000.0), 100, 100)
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001])
    assert scale == 1.0


def test_rope_factors_divide_frequencies() -> None:
    frequencies, _ = inverse_frequencies(
        RopeSpec(8, 10000.0, factors=(1.0, 2.0, 4.0, 8.0)), 100, 100
    )
    np.testing.assert_allclose(frequencies, [1, 0.05, 0.0025, 0.000125])


def test_llama3_scaling_as_factors() -> None:
    """GGUF files store the llama3 rule as one factor for each pair."""
    rope = RopeSpec(64, 500000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled, _ = inverse_frequencies(rope, 131072, 131072)
    plain, _ = inverse_frequencies(RopeSpec(64, 500000.0), 131072, 131072)
    again, _ = inverse_frequencies(
        RopeSpec(64, 500000.0, factors=tuple((plain / scaled).tolist())), 131072, 131072
    )
    np.testing.assert_allclose(again, scaled)


def test_original_context_defaults_to_max_context() -> None:
    given = RopeSpec(64, 10000.0, "yarn", 4.0, 4096)
    np.testing.assert_array_equal(
        inverse_frequencies(given, 1, 1)[0],
        inverse_frequencies(RopeSpec(64, 10000.0, "yarn", 4.0), 4096, 4096)[0],
    )
