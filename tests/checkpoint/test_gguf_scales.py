"""Scales next to the weights of GGUF files."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend import forward
from headrace.checkpoint.gguf_scales import with_scales
from headrace.config import KvConfig
from headrace.errors import FormatError, ModelError, UnsupportedModelError
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.tiny import Tensors, tiny_executable, tiny_model

SCALE = 0.37


def floats(name: str, *values: float) -> StoredTensor:
    return StoredTensor.from_floats(name, np.array(values, np.float32))


def experts() -> StoredTensor:
    return replace(random_stored("NVFP4", 12, 64, 0, "x.weight"), shape=(3, 4, 64))


@pytest.mark.parametrize("name", ["x.scale", "x.weight.scale"])
@pytest.mark.parametrize("format", ["NVFP4", "IQ4_NL", "TQ2_0", "F32", "BF16"])
def test_a_weight_is_multiplied_by_its_scale(format: str, name: str) -> None:
    weight = random_stored(format, 8, 256, 1, "x.weight")
    tensors = {"x.weight": weight, name: floats(name, SCALE), "x.input_scale": floats("i", 2.0)}
    found = with_scales(tensors, "a.gguf")
    assert found.keys() == {"x.weight"}
    np.testing.assert_allclose(
        found["x.weight"].dequantise(), weight.dequantise() * np.float32(SCALE), rtol=3e-7
    )
    rows = np.array([6, 1, 3])
    taken = found["x.weight"].take("y", rows).dequantise()
    assert (taken == found["x.weight"].dequantise()[rows]).all()


def test_each_expert_has_its_scale() -> None:
    scales = np.array([1.0, 0.5, 3.0], np.float32)
    tensors = {"x.weight": experts(), "x.scale": floats("x.scale", *scales)}
    found = with_scales(tensors, "a.gguf")["x.weight"]
    want = experts().dequantise() * scales[:, None, None]
    np.testing.assert_allclose(found.dequantise(), want, rtol=3e-7)


def test_a_scale_of_1_keeps_the_format() -> None:
    weight = random_stored("Q4_K", 8, 256, 1, "x.weight")
    assert with_scales({"x.weight": weight, "x.scale": floats("x.scale", 1)}, "") == {
        "x.weight": weight
    }


def test_only_scales_of_weights_are_read() -> None:
    tensors = {"norm.scale": floats("norm.scale", 2.0), "q.scale": floats("q.scale", 2.0)}
    assert with_scales(tensors, "a.gguf") == tensors


WEIGHT = random_stored("NVFP4", 8, 64, 1, "x.weight")
REFUSED: dict[str, tuple[Tensors, type[ModelError], str]] = {
    "two numbers": ({"x.scale": floats("x.scale", 1, 2)}, FormatError, "expected 1 finite number"),
    "not finite": ({"x.scale": floats("x.scale", np.nan)}, FormatError, "finite number"),
    "codes": ({"x.scale": random_stored("Q8_0", 1, 32, 0, "x.scale")}, FormatError, "is Q8_0"),
    "two scales": (
        {"x.scale": floats("x.scale", 2), "x.weight.scale": floats("x.weight.scale", 2)},
        FormatError,
        "x.weight has two scales",
    ),
    "a block type": (
        {
            "x.weight": random_stored("Q4_K", 8, 256, 1, "x.weight"),
            "x.scale": floats("x.scale", 2),
        },
        UnsupportedModelError,
        "x.weight is Q4_K with a scale",
    ),
    "too few for experts": (
        {"x.weight": experts(), "x.scale": floats("x.scale", 1, 2)},
        FormatError,
        "expected 3 finite numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_scales(case: str) -> None:
    tensors, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        with_scales({"x.weight": WEIGHT} | tensors, "a.gguf")


def test_kernels_multiply_scaled_weights() -> None:
    spec, tensors = tiny_model(0, dim=64, ffn=64, format="NVFP4")
    matrices = [name for name, tensor in tensors.items() if tensor.format.name == "NVFP4"]
    stored = {(f"{name}.weight" if name in matrices else name): t for name, t in tensors.items()}
    stored |= {f"{name}.scale": floats(name, SCALE + 0.1 * i) for i, name in enumerate(matrices)}
    scaled = {
        name.removesuffix(".weight"): tensor
        for name, tensor in with_scales(stored, "a.gguf").items()
    }
    plain = {name: StoredTensor.from_floats(name, t.dequantise()) for name, t in scaled.items()}
    prompt = [1, 2, 3, 4, 5]
    batch = batch_of([Sequence([0], 32)], [prompt], [([], [])], False, 1)

    def logits(backend: str, weights: Tensors) -> NDArray[np.float32]:
        kv = KvConfig((4,), 32, "f32")
        result = forward(tiny_executable((spec, weights), backend, kv), batch).logits
        assert result is not None
        return result.copy()

    want = logits("reference", plain)
    np.testing.assert_allclose(logits("cpu", scaled), want, atol=1e-3 * np.abs(want).max())
