"""Encoders of ggml's formats, read by gguf-py; tests/llama_cpp compares them with
llama.cpp.
"""

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.quant.encode import ENCODERS, encode

Floats = NDArray[np.float32]

MAX_ERRORS = {
    "F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q4_0": 1 / 8, "Q4_1": 1 / 15, "Q5_0": 1 / 16,
    "Q5_1": 1 / 31, "Q8_0": 1 / 254, "Q2_K": 0.4,
    "Q3_K": 0.27, "Q4_K": 0.08, "Q5_K": 0.05, "Q6_K": 0.04, "IQ4_NL": 0.11, "IQ4_XS": 0.13,
    "MXFP4": 1 / 5, "TQ1_0": 1, "TQ2_0": 1,
}  # fmt: skip
"""The root mean square error relative to a block's maximum: half a step, or the step
next to the shorter end.
"""
BY_GGUF = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")


def decoded(name: str, codes: NDArray[np.uint8]) -> Floats:
    if name in ("F32", "F16"):
        return codes.view("<f4" if name == "F32" else "<f2")[..., 0].astype(np.float32)
    values = gguf.quants.dequantize(
        np.ascontiguousarray(codes.reshape(len(codes), -1)), gguf.GGMLQuantizationType[name]
    )
    return values.astype(np.float32)


def squared_error(name: str, codes: NDArray[np.uint8], values: Floats, weights: Any = 1) -> float:
    return float((np.square(decoded(name, codes).astype(np.float64) - values) * weights).sum())


def heavy_tailed(seed: int, rows: int, cols: int) -> Floats:
    """Rows of all sizes, some with outliers, and parts of very different size."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, rng.choice([0.0, 1.0, 2.0]), (rows, cols // 16)))
    values = (
        rng.standard_t(rng.choice([2, 5, 100]), (rows, cols))
        * np.repeat(spread, 16, axis=1)
        * 10.0 ** rng.uniform(-1, 1)
    )
    return np.clip(values + rng.choice([0, 0, 3]) * values.std(), -6e4, 6e4).astype(np.float32)


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 3), blocks=st.integers(1, 2))
def test_encoding_errors_are_parts_of_a_step(name: str, seed: int, rows: int, blocks: int) -> None:
    values = heavy_tailed(seed, rows, 256 * blocks)
    block = ENCODERS[name].block
    codes = encode(name, values)
    assert codes.shape == (
        rows,
        256 * blocks // block,
        gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1],
    )
    of_blocks = values.reshape(-1, block)
    errors = np.sqrt(
        np.square(decoded(name, codes).reshape(of_blocks.shape) - of_blocks).mean(axis=1)
    )
    assert np.all(
        errors <= MAX_ERRORS[name] * np.abs(of_blocks).max(axis=1) * 1.01 + 2**-18
    )  # the rest: scales of tiny values are few


@pytest.mark.parametrize("name", BY_GGUF)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_encoding_errors_are_at_most_ggufs(name: str, seed: int) -> None:
    values = heavy_tailed(seed, 4, 512)
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert (
        squared_error(name, encode(name, values), values)
        <= squared_error(name, theirs.reshape(4, -1), values) * 1.01
    )


def on_grid(name: str, seed: int) -> NDArray[np.uint8]:
    """Blocks of any codes, with the largest code among them, and scales that are normal
    numbers.
    """
    rng = np.random.default_rng(seed)
    if name.startswith("TQ"):
        values = rng.integers(-1, 2, (8, 256)).astype(np.float32) * rng.normal(size=(8, 1)).astype(
            np.float16
        )
        return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[name])
    codes = rng.integers(
        0, 256, (8, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]), np.uint8
    )
    halves = 2 if name in ("Q4_1", "Q5_1") else 1
    scales = rng.normal(size=(8, halves)).astype(np.float16)
    if halves == 2:
        scales[:, 0] = np.abs(scales[:, 0])
    codes[:, : 2 * halves] = scales.view(np.uint8)
    if name == "Q8_0":
        codes[:, 2:][codes[:, 2:] == 128] = 127
        codes[:, 5] = 127
    elif name == "MXFP4":
        codes[:, 0] = rng.integers(0, 251, 8)
        codes[:, 5] = 0x7F
    else:
        fifth = 4 if name.startswith("Q5") else 0
        codes[:, 2 * halves : 2 * halves + fifth] = rng.integers(0, 256, (8, fifth))
        if fifth:
            codes[:, 2 * halves] = 2
        codes[:, 2 * halves + fifth : 2 * halves + fifth + 2] = [0x10, 0x5F]
    return codes


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0"]
)
@pytest.mark.parametrize("seed", range(20))
def test_values_of_a_format_come_back(name: str, seed: int) -> None:
    values = decoded(name, on_grid(name, seed))
    last_digits = (
        1e-6 * np.abs(values).max() if name in ("Q4_1", "Q5_1") else 0
    )  # of a minimum that is small for its range
    np.testing.assert_allclose(
        decoded(name, encode(name, values)), values, rtol=0, atol=last_digits
    )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_numbers_are_rounded_to_nearest(name: str) -> None:
    values = np.array(
        [[1.0, -0.0, 1 + 2**-11 + 2**-20, 1 + 2**-8 + 2**-12, 3.4e38, -1e30]], np.float32
    )
    want = {
        "F32": values[0],
        "F16": np.array([1, -0.0, 1 + 2**-10, 1 + 2**-8, 65504, -65504], np.float32),
        "BF16": np.array([1, -0.0, 1, 1 + 2**-7, 255 * 2.0**120, -1e30], np.float32),
    }
    np.testing.assert_allclose(
        decoded(name, encode(name, values))[0], want[name], rtol=1e-3 if name == "BF16" else 0
    )


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("value", [0, 1, -1, 0.3, -700.0, 0.02])
def test_constant_blocks(name: str, value: float) -> None:
    values = np.full((2, 512), value, np.float32)
    part = 0.2 if name == "MXFP4" else 0.01
    np.testing.assert_allclose(decoded(name, encode(name, values)), values, rtol=part, atol=2**-24)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("size", [1e5, 1e9, 1e20, 3.4e38])
def test_huge_values_become_the_largest(name: str, size: float) -> None:
    values = (np.sign(heavy_tailed(3, 2, 512)) * np.float32(size)).astype(np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = decoded(name, encode(name, values))
    assert np.isfinite(found).all() and np.array_equal(np.sign(found), np.sign(values))
    assert np.abs(found).min() >= 0.8 * min(size, 65504)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("size", [1e-5, 1e-7, 1e-12, 1e-38])
def test_tiny_values_are_not_made_larger(name: str, size: float) -> None:
    """If float16 has no scale that is small enough, 0 is the best value."""
    values = (np.random.default_rng(0).normal(size=(2, 512)) * size).astype(np.float32)
    assert (
        squared_error(name, encode(name, values), values)
        <= np.square(values.astype(np.float64)).sum() * 1.01
    )


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name: str, value: float) -> None:
    values = np.zeros((300, 256), np.float32)
    values[299, 17] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(name, values)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_are_encoded_independently(name: str) -> None:
    values, importance = (
        heavy_tailed(5, 100, 768),
        np.random.default_rng(6).exponential(size=768).astype(np.float32),
    )
    together = encode(name, values, importance)
    for row in (0, 41, 85, 99):
        np.testing.assert_array_equal(
            encode(name, values[row : row + 1], importance)[0], together[row]
        )


@pytest.mark.parametrize(
    "name", [name for name in ENCODERS if name not in ("F32", "F16", "BF16", "Q8_0")]
)
def test_importance_weights_errors(name: str) -> None:
    rng = np.random.default_rng(7)
    values, importance = (
        heavy_tailed(8, 16, 512),
        np.square(rng.exponential(size=512)).astype(np.float32),
    )
    plain, weighted = encode(name, values), encode(name, values, importance)
    assert squared_error(name, weighted, values, importance) < 0.99 * squared_error(
        name, plain, values, importance
    )
    for even in (np.full(512, 3, np.float32), np.zeros(512, np.float32)):
        np.testing.assert_array_equal(encode(name, values, even), plain)


def test_columns_without_importance() -> None:
    values, importance = heavy_tailed(9, 4, 256), np.zeros(256, np.float32)
    importance[::64] = 1
    assert (
        squared_error("Q4_K", encode("Q4_K", values, importance), values)
        < 0.05 * np.square(values.astype(np.float64)).sum()
    )
