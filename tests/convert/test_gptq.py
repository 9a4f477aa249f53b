"""GPTQ, and the products that weigh its errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.convert.activation_stats import input_products
from headrace.convert.gptq import feedback, gptq
from headrace.convert.matrices import quantisable
from headrace.quant.format_names import named_format
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import QuantSpec, dequantise_rows
from tests.convert.conversion import quantise
from tests.families import spec_of
from tests.tables import KINDS
from tests.tiny import random_tensors, tiny_model

SPEC, TENSORS = tiny_model(2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=61)
PIECES = [list(map(int, piece)) for piece in np.random.default_rng(0).integers(0, 61, (3, 40))]


def correlated(seed: int, cols: int, rank: int) -> np.ndarray:
    """Inputs [rows, cols] near a few directions, with some much larger channels, as in
    real models.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * cols, rank)) @ rng.standard_normal(
        (rank, cols)
    ) + 0.1 * rng.standard_normal((4 * cols, cols))
    return (x * np.exp(rng.normal(0, 1, cols))).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_gptq_lowers_output_errors(kind: str, seed: int) -> None:
    spec = KINDS[kind]
    weights = np.random.default_rng(seed).standard_normal((24, 256)).astype(np.float32)
    x = correlated(seed, 256, 24)
    products = x.T @ x / len(x)

    def error(rows: object) -> float:
        return float(np.square(x @ (dequantise_rows(spec, rows) - weights).T).mean())  # type: ignore[arg-type]

    assert error(gptq(weights, feedback(products), spec)) < 0.9 * error(
        round_to_nearest(weights, spec)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gptq_rounds_independent_columns_to_nearest(
    kind: str,
) -> None:
    spec, rng = KINDS[kind], np.random.default_rng(1)
    weights = rng.standard_normal((8, 320)).astype(np.float32)
    squares = rng.uniform(0.5, 2, 320).astype(np.float32)
    for ours, nearest in zip(
        gptq(weights, feedback(np.diag(squares)), spec),
        round_to_nearest(weights, spec, importance=squares),
        strict=True,
    ):
        assert (ours is None and nearest is None) or np.array_equal(ours, nearest)


def test_gptq_with_unused_columns() -> None:
    spec, x = QuantSpec(4, 32), correlated(2, 64, 8)
    x[:, [3, 40]] = 0
    weights = np.random.default_rng(2).standard_normal((16, 64)).astype(np.float32)
    changed = weights.copy()
    changed[:, [3, 40]] = 100
    products = x.T @ x / len(x)
    for ours, others in zip(
        gptq(weights, feedback(products), spec)[:2],
        gptq(changed, feedback(products), spec)[:2],
        strict=True,
    ):
        assert np.array_equal(ours, others)


def test_input_products() -> None:
    """The first layer reads the normed embeddings, in any number of passes over the text."""
    names = quantisable(SPEC, TENSORS)
    whole = list(input_products(SPEC, TENSORS, names, PIECES, 1, lambda done: None))
    told: list[float] = []
    parts = list(input_products(SPEC, TENSORS, names, PIECES, 1, told.append, memory=4 * 64 * 64))
    assert sorted(name for _, readers in whole for name in readers) == sorted(names)
    assert [readers for _, readers in whole] == [readers for _, readers in parts] and len(
        whole
    ) == 2 * 4
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(whole, parts, strict=True))
    assert len(told) >= 4 * len(PIECES) and told == sorted(told) and told[-1] == 1
    x = TENSORS["embed"].dequantise()[np.concatenate(PIECES)].astype(np.float64)
    x = (
        x
        / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + SPEC.norm_eps)
        * TENSORS["layers.0.attn_norm"].dequantise()
    )
    assert "layers.0.q" in whole[0][1]
    np.testing.assert_allclose(whole[0][0], x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "variant", ["gemma2", "falcon-7b", "deepseek-v3", "gpt2", "mixtral", "command-r", "gpt-oss"]
)
def test_products_of_all_families_in_segments(variant: str) -> None:
    """Layers that are read one after the other see the same rows as all layers at once."""
    spec = spec_of(variant)
    tensors = random_tensors(spec, 3)
    names = quantisable(spec, tensors)
    whole = input_products(spec, tensors, names, PIECES, 1, lambda done: None)
    told: list[float] = []
    parts = input_products(spec, tensors, names, PIECES, 1, told.append, memory=1)
    for (ours, readers), (others, names_of_others) in zip(parts, whole, strict=True):
        assert readers == names_of_others and np.array_equal(ours, others)
    assert len(told) >= spec.num_layers * len(PIECES)


def test_feedback_of_products_that_are_not_positive() -> None:
    products = np.array([[1, 2], [2, 1]], np.float32)
    with pytest.raises(np.linalg.LinAlgError):
        feedback(products)


@pytest.mark.parametrize("cols", [1, 31, 512, 700, 1100])
def test_feedback_is_a_cholesky_factor(cols: int) -> None:
    x = correlated(0, cols, 8) if cols > 1 else np.ones((4, 1), np.float32)
    products = x.T @ x / len(x)
    order, lower, importance, diagonal = feedback(products)
    damped = products + 0.01 * np.diag(products).mean() * np.eye(cols)
    factor = np.linalg.cholesky(damped[np.ix_(order, order)].astype(np.float64))
    np.testing.assert_allclose(np.tril(lower), factor / np.diag(factor), atol=2e-3)
    np.testing.assert_allclose(diagonal, np.diag(factor), rtol=2e-3)
    assert np.array_equal(importance, np.diag(products))


def test_gptq_quantises_a_model() -> None:
    names = quantisable(SPEC, TENSORS)
    result = quantise("gptq", SPEC, TENSORS, names, named_format("int4-g32"), PIECES)
    assert all(
        result[name].format.spec == named_format("int4-g32")
        and result[name].shape == TENSORS[name].shape
        for name in names
    )
    assert all(result[name] is TENSORS[name] for name in TENSORS.keys() - set(names))
