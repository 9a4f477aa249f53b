"""KV formats of every family keep the quality of keys with outliers."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace.backend_traits import KvDtype
from headrace.checkpoint.key_biases import has_large_key_biases, split_key_biases
from headrace.cli.main import main
from headrace.convert.quality import Scorer
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from tests.families import VARIANTS, VOCAB, config_of, save_model, spec_of
from tests.tiny import Tensors, random_tensors

TEXT = np.random.default_rng(1).integers(0, VOCAB, 64).tolist()
BOUNDS: dict[KvDtype, tuple[float, float]] = {
    "bf16": (3e-5, 2e-3),
    "int8": (2e-4, 3e-3),
    "int4": (0.03, 1.5),
    "k8v4": (0.02, 0.5),
}
"""Nats of the median KL divergence, with large biases and with other outliers."""


def with_outliers(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """Large numbers in some dimensions of keys: biases, weights of their norm, or long rows."""
    changed = dict(tensors)

    def put(name: str, values: NDArray[np.float32]) -> None:
        changed[name] = StoredTensor.from_floats(name, values)

    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        if spec.mla or spec.qk_norm != "none":
            name = prefix + ("kv_a_norm" if spec.mla else "k_norm")
            norm = tensors[name].dequantise()
            norm.reshape(-1)[::9] *= 8
            put(name, norm)
        elif prefix + "k_bias" in tensors:
            bias = tensors[prefix + "k_bias"].dequantise().reshape(-1, spec.head_dim)
            bias[:, [3, spec.head_dim - 1]] = (145, -211)
            put(prefix + "k_bias", bias.reshape(-1))
            put(prefix + "q", 0.2 * tensors[prefix + "q"].dequantise())
            put(prefix + "q_bias", np.zeros_like(tensors[prefix + "q_bias"].dequantise()))
        else:
            matrix = tensors[prefix + "k"].dequantise()
            matrix[::9] *= 3
            put(prefix + "k", matrix)
    return split_key_biases(spec, changed)


@pytest.mark.parametrize("name", VARIANTS)
def test_kv_formats_of_all_families_with_outliers(name: str) -> None:
    spec = spec_of(name)
    tensors = with_outliers(spec, random_tensors(spec, 1))
    is_biased = spec.qkv_bias and not spec.mla and spec.qk_norm == "none"
    assert has_large_key_biases(tensors) == is_biased

    exact = np.concatenate(probabilities(spec, tensors, "reference", "f32"))
    for dtype, bounds in BOUNDS.items():
        rounded = np.concatenate(probabilities(spec, tensors, "cpu", dtype))
        divergences = (np.exp(exact) * (exact - rounded)).sum(axis=1, dtype=np.float64)
        # A mixture may choose another expert at some position, so the median is compared.
        assert abs(np.median(divergences)) <= bounds[0 if is_biased else 1]


def probabilities(
    spec: ModelSpec, tensors: Tensors, backend: str, dtype: KvDtype
) -> list[NDArray[np.float32]]:
    scorer = Scorer(trace_model(spec, tensors), tensors, len(TEXT), backend, 1, dtype)
    chunks = list(scorer.log_probabilities(TEXT))
    scorer.close()
    return chunks


@pytest.mark.parametrize(
    ("name", "keys", "measured"),
    [
        ("qwen2", "large biases", "Qwen2.5-Coder-0.5B"),
        ("phi2", "large biases", "Qwen2.5-Coder-0.5B"),
        ("mistral-full", "no large biases, no norm", "SmolLM2-135M"),
        ("qwen3-biases", "a norm", None),
        ("olmo2", "a norm", None),
        ("deepseek-v3", "a latent row", None),
    ],
)
def test_show_names_the_measured_kind_of_keys(
    name: str, keys: str, measured: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = spec_of(name)
    save_model(name, tmp_path)
    if keys == "large biases":
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        for key in tensors:
            if "k_proj.bias" in key:
                tensors[key][:2] = 200
        save_file(tensors, path)
    assert main(["show", str(tmp_path), "--backend", "cpu"]) == 0
    told = capsys.readouterr().out
    assert f"KV format            {'f16' if keys == 'large biases' else 'bf16'}" in told
    if measured:
        assert f"{keys}, as in {measured}, whose NLL is below" in told
        assert told.count(f"% on {measured}") >= 3
    else:
        assert f"{keys}; no such model was measured, so measure this one: headrace eval" in told
        assert "NLL +" not in told
    assert spec.architecture in told


def test_show_does_not_know_biases_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config_of("qwen2").save_pretrained(tmp_path)
    assert main(["show", str(tmp_path / "config.json"), "--backend", "cpu"]) == 0
    assert "biases of unknown size; no such model was measured" in capsys.readouterr().out
