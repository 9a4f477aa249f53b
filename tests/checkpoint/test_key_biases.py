"""Large key biases are not stored in the KV, and every number format keeps its quality."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend_traits import KvDtype
from headrace.checkpoint.key_biases import has_large_key_biases, split_key_biases
from headrace.convert.quality import Quality, QualityMeter, Scorer
from headrace.model import trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import StoredTensor
from tests.tiny import Tensors, tiny_model

VOCAB = 61


def stored(name: str, values: Any) -> StoredTensor:
    return StoredTensor.from_floats(name, np.asarray(values, np.float32))


def numbers(tensors: Tensors, name: str) -> NDArray[np.float32]:
    return tensors[name].dequantise().reshape(-1)


def biased(bias: Any, **constants: Any) -> tuple[ModelSpec, Tensors]:
    """A model of one layer with 2 KV heads of 24 numbers and this bias of its keys."""
    spec, tensors = tiny_model(0, layers=1, dim=96, qkv_bias=True, **constants)
    return spec, tensors | {"layers.0.k_bias": stored("layers.0.k_bias", bias)}


def test_long_pairs_are_split_from_a_bias() -> None:
    bias = np.zeros((2, 24))
    bias[0, 4:6], bias[0, 7], bias[1, 23] = (5, -7), 7.5, -300
    parts = split_key_biases(*biased(bias.reshape(-1)))
    large = np.zeros((2, 24))
    large[0, 4:6], large[1, 22:] = (5, -7), (0, -300)
    assert np.array_equal(numbers(parts, "layers.0.k_bias_large"), large.reshape(-1))
    assert np.array_equal(numbers(parts, "layers.0.k_bias_small"), (bias - large).reshape(-1))


def test_a_head_has_at_most_eight_long_pairs() -> None:
    bias = np.repeat(np.arange(20, 44, 2), 2)
    large = numbers(split_key_biases(*biased(np.tile(bias, 2))), "layers.0.k_bias_large")
    assert np.array_equal(large, np.tile(np.where(bias < 28, 0, bias), 2))


@pytest.mark.parametrize(
    ("bias", "constants"),
    [(1, {}), (7.9 / 2**0.5, {}), (np.nan, {}), (np.inf, {}), (300, {"qk_norm": "head"})],
)
def test_other_biases_stay_whole(bias: float, constants: dict[str, Any]) -> None:
    spec, tensors = biased(np.full(48, bias))
    assert split_key_biases(replace(spec, **constants), tensors) == tensors
    assert not has_large_key_biases(tensors)


def outliers(**constants: Any) -> tuple[ModelSpec, Tensors]:
    """A model with large numbers in some dimensions of its keys: biases of up to 300, weights of
    the norm of keys, or long rows of the key matrix.
    """
    spec, tensors = tiny_model(
        3, layers=2, dim=128, heads=4, kv_heads=2, vocab=VOCAB, context=512, **constants
    )
    for layer in range(spec.num_layers):
        name = f"layers.{layer}.k"
        if spec.qkv_bias:
            bias = np.zeros((2, 32))
            bias[0, [3, 30, 31]], bias[1, [0, 9, 28]] = (145, -211, 90), (300, -66, 158)
            tensors[f"{name}_bias"] = stored(f"{name}_bias", bias.reshape(-1))
            matrix = 0.2 * tensors[f"layers.{layer}.q"].dequantise()
            tensors[f"layers.{layer}.q"] = stored(f"layers.{layer}.q", matrix)
            tensors[f"layers.{layer}.q_bias"] = stored(f"layers.{layer}.q_bias", np.zeros(128))
        elif spec.qk_norm == "head":
            norm = np.ones(32)
            norm[[5, 28]] = 12
            tensors[f"{name}_norm"] = stored(f"{name}_norm", norm)
        else:
            matrix = tensors[name].dequantise()
            matrix[[5, 28, 40]] *= 6
            tensors[name] = stored(name, matrix)
    return spec, split_key_biases(spec, tensors)


KINDS: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True},
    "biases, partial rotation": {"qkv_bias": True, "rope": RopeSpec(16)},
    "biases, yarn": {
        "qkv_bias": True,
        "rope": RopeSpec(32, scaling="yarn", factor=4.0, original_context=64),
    },
    "biases, no rotation": {"qkv_bias": True, "rotated": (False, False)},
    "biases, a window": {"qkv_bias": True, "window": 40},
    "norms": {"qk_norm": "head"},
    "long rows": {},
}
"""What is large in keys, by kind."""


def quality(model: tuple[ModelSpec, Tensors], dtype: KvDtype) -> Quality:
    """NLL of a text on the CPU, and the KL divergence from the reference backend's exact KV."""
    spec, tensors = model
    text = np.random.default_rng(1).integers(0, VOCAB, 300).tolist()
    program = trace_model(spec, tensors)
    exact = Scorer(program, tensors, len(text), "reference", 1, "f32")
    scorer, meter = Scorer(program, tensors, len(text), "cpu", 1, dtype), QualityMeter()
    meter.add(text, scorer.log_probabilities(text), exact.log_probabilities(text))
    return meter.quality()


BOUNDS: dict[KvDtype, tuple[float, float]] = {
    "f32": (1e-6, 1e-6),
    "f16": (2e-6, 1e-5),
    "bf16": (3e-5, 1e-3),
    "int8": (3e-4, 3e-3),
    "int4": (0.06, 0.5),
}
"""Nats of KL divergence, with large biases and with other outliers. Whole biases exceed them."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_kv_formats_keep_the_quality_of_keys_with_outliers(kind: str, dtype: KvDtype) -> None:
    model = outliers(**KINDS[kind])
    is_biased = kind.startswith("biases")
    assert has_large_key_biases(model[1]) == is_biased
    kl = quality(model, dtype).kl
    assert kl is not None and abs(kl) <= BOUNDS[dtype][0 if is_biased else 1]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("biases")])
def test_split_biases_give_the_numbers_of_whole_ones(kind: str) -> None:
    spec, tensors = outliers(**KINDS[kind])
    whole = {name: x for name, x in tensors.items() if not has_large_key_biases([name])}
    split, kept = (quality((spec, x), "f32") for x in (tensors, whole))
    assert split.nll == pytest.approx(kept.nll, rel=1e-5)
