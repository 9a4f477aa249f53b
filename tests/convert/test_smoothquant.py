"""SmoothQuant, and W8A8: int8 by row for weights and activations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.convert.activation_stats import input_column_stats, update_maxima
from headrace.convert.matrices import quantisable, quantised_matrix
from headrace.convert.smoothquant import smoothquant
from headrace.errors import FormatError
from headrace.quant.format_names import LLM_INT8, W8A8, named_format
from headrace.quant.formats import StoredTensor
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import dequantise_rows
from tests.convert.conversion import quantise
from tests.convert.outliers import FACTOR, judged, with_outliers
from tests.tiny import tiny_model

SPEC, TENSORS = tiny_model(2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=61)
OUTLIERS = with_outliers(SPEC, TENSORS)
NAMES = quantisable(SPEC, TENSORS)
PIECES = [list(map(int, piece)) for piece in np.random.default_rng(0).integers(0, 61, (3, 40))]
JUDGED = [list(map(int, piece)) for piece in np.random.default_rng(1).integers(0, 61, (2, 60))]


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), cols=st.integers(1, 90), seed=st.integers(0, 2**16))
def test_w8a8_values(rows: int, cols: int, seed: int) -> None:
    """The stored matrix has the rounded values, within half a step of the weights."""
    weights = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    weights[0] = 0
    codes = round_to_nearest(weights, W8A8)
    stored = quantised_matrix(StoredTensor.from_floats("w", weights), W8A8, [codes])
    assert stored.format.name == "I8_ROW"
    values = stored.dequantise()
    np.testing.assert_array_equal(values, dequantise_rows(W8A8, codes))
    assert (
        np.abs(values - weights) <= np.abs(weights).max(axis=1, keepdims=True) / 254 * (1 + 1e-4)
    ).all()


def test_input_maxima() -> None:
    """The first layer reads the normed embeddings."""
    told: list[float] = []
    found = input_column_stats(update_maxima, SPEC, TENSORS, NAMES, PIECES, 1, told.append)
    assert len(found) == 2 * 4 and sorted(name for _, names in found for name in names) == sorted(
        NAMES
    )
    assert told == [1 / 3, 2 / 3, 1]
    x = TENSORS["embed"].dequantise()[np.concatenate(PIECES)].astype(np.float64)
    x = (
        x
        / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + SPEC.norm_eps)
        * TENSORS["layers.0.attn_norm"].dequantise()
    )
    assert "layers.0.q" in found[0][1]
    np.testing.assert_allclose(found[0][0], np.abs(x).max(axis=0), rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_smoothquant_factors(alpha: float) -> None:
    """Factors follow the formula, and the smoothed input has the maxima that the
    weights leave to it.
    """
    scalings = smoothquant(SPEC, TENSORS, NAMES, PIECES, 1, lambda done: None, alpha)
    largest = next(
        x
        for x, names in input_column_stats(
            update_maxima, SPEC, TENSORS, NAMES, PIECES, 1, lambda done: None
        )
        if "layers.1.gate" in names
    )
    weights = np.maximum(
        *(np.abs(TENSORS[f"layers.1.{part}"].dequantise()).max(axis=0) for part in ("gate", "up"))
    )
    want = largest**alpha / weights ** (1 - alpha)
    for part in ("gate", "up"):
        np.testing.assert_allclose(scalings.columns[f"layers.1.{part}"], want, rtol=1e-5)
    np.testing.assert_allclose(scalings.rows["layers.1.mlp_norm"], 1 / want, rtol=1e-5)


def test_smoothquant_with_unused_columns() -> None:
    tensors = dict(TENSORS)
    norm = TENSORS["layers.0.mlp_norm"].dequantise().copy()
    norm[[3, 40]] = 0
    tensors["layers.0.mlp_norm"] = StoredTensor.from_floats("layers.0.mlp_norm", norm)
    factors = smoothquant(SPEC, tensors, NAMES, PIECES, 1, lambda done: None).columns["layers.0.up"]
    assert (factors[[3, 40]] == 1).all() and np.isfinite(factors).all() and (factors > 0).all()


def test_outliers_break_w8a8_and_smoothing_repairs_it() -> None:
    def kl(tensors: dict[str, StoredTensor]) -> float:
        found = judged(SPEC, TENSORS, tensors, JUDGED).kl
        assert found is not None
        return found

    as_it_is = kl(quantise("rtn", SPEC, TENSORS, NAMES, W8A8))
    broken = kl(quantise("rtn", SPEC, OUTLIERS, NAMES, W8A8))
    told: list[float] = []
    smoothed = quantise("smoothquant", SPEC, OUTLIERS, NAMES, W8A8, PIECES, 1, told.append)
    assert kl(OUTLIERS) < 1e-3 and told == sorted(told) and told[-1] <= 1
    assert broken > 20 * as_it_is and kl(smoothed) < 2 * as_it_is, (
        f"{as_it_is} {broken} {kl(smoothed)}"
    )
    assert all(smoothed[name].format.name == "I8_ROW" for name in NAMES)
    # Int8 by row gives the columns of weights that are smaller than others the coarser codes,
    # whatever they are multiplied with.
    assert as_it_is < kl(quantise("rtn", SPEC, OUTLIERS, NAMES, LLM_INT8)) < 0.2 * broken


def test_wide_outliers_repair_w8a8() -> None:
    tensors = with_outliers(SPEC, TENSORS, same_function=False)
    broken, mixed = (
        judged(SPEC, tensors, quantise("rtn", SPEC, tensors, NAMES, to), JUDGED).kl
        for to in (W8A8, LLM_INT8)
    )
    assert broken is not None and mixed is not None and 0 < mixed < 0.15 * broken


@pytest.mark.parametrize("method", ["smoothquant", "awq", "gptq"])
def test_models_whose_activations_are_not_finite(method: str) -> None:
    embed = TENSORS["embed"].dequantise().copy()
    embed[PIECES[0][3], 2] = np.inf
    tensors = TENSORS | {"embed": StoredTensor.from_floats("embed", embed)}
    with pytest.raises(FormatError, match=r"tensor layers\.0\.q: .* not finite"):
        quantise(method, SPEC, tensors, NAMES, W8A8, PIECES)


def test_with_outliers() -> None:
    """The helper makes columns as large as it promises."""
    plain, other = (first_maxima(tensors) for tensors in (TENSORS, OUTLIERS))
    ratios = np.sort(other / plain)
    assert ratios[-1] == pytest.approx(FACTOR) and ratios[:-1] == pytest.approx(np.ones(63))


def first_maxima(tensors: dict[str, StoredTensor]) -> np.ndarray:
    return next(
        x
        for x, names in input_column_stats(
            update_maxima, SPEC, tensors, NAMES, PIECES, 1, lambda done: None
        )
        if "layers.0.q" in names
    )


def test_format_name_of_w8a8() -> None:
    assert named_format("w8a8") == W8A8 != named_format("int8-row")
