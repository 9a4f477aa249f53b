"""LLM.int8: activations beyond 6 stay float32, and the other numbers of a row are int8 by row."""

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import _native
from tests.backend.stored import quantised_rows, random_stored
from tests.backend.test_table_formats import product as table_product

ISAS = _native.isas()
MOST = 32
"""Number of outliers in a row."""
THRESHOLD = 6.0

product = partial(table_product, float_activations=False)


def activations(
    rows: int, cols: int, outliers: int, seed: int, size: float = 40.0
) -> NDArray[np.float32]:
    """Rows of numbers within the threshold, except for `outliers` numbers in each row."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-THRESHOLD, THRESHOLD, (rows, cols)).astype(np.float32)
    for row in x:
        row[rng.permutation(cols)[:outliers]] = rng.choice([-1, 1], outliers) * rng.uniform(
            THRESHOLD * 1.01, size, outliers
        )
    return x


def mixed(x: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The expected result."""
    result = np.empty((len(x), len(values)))
    for i, row in enumerate(x):
        threshold = np.float32(THRESHOLD)
        while (np.abs(row) > threshold).sum() > MOST:
            threshold *= np.float32(1.25)
        is_outlier = np.abs(row) > threshold
        inside = quantised_rows(np.where(is_outlier, np.float32(0), row)[None], False, len(row))[0]
        result[i] = (inside + np.where(is_outlier, row, 0)) @ values.T.astype(np.float64)
    return result


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("outliers", [0, 1, 5, MOST, MOST + 1, 100])
def test_outlier_products(isa: str, outliers: int) -> None:
    for seed, (num_rows, rows, cols) in enumerate(((1, 17, 256), (7, 40, 300), (20, 16, 131))):
        x = activations(num_rows, cols, outliers, seed)
        weight = random_stored("I8_MIXED", rows, cols, seed)
        want = mixed(x, weight.dequantise())
        error = np.abs(product(isa, weight, x, False) - want)
        assert np.all(error <= 2e-6 * (np.abs(x) @ np.abs(weight.dequantise()).T) + 1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_outliers_do_not_coarsen_the_others(isa: str) -> None:
    x = activations(9, 256, 3, 0, size=600.0)
    errors = {}
    for name in ("I8_ROW", "I8_MIXED"):
        weight = random_stored(name, 48, 256, 7)
        errors[name] = np.linalg.norm(
            product(isa, weight, x, False) - x @ weight.dequantise().astype(np.float64).T
        )
    assert errors["I8_MIXED"] < 0.05 * errors["I8_ROW"]


@pytest.mark.parametrize("isa", ISAS)
def test_outlier_format_without_outliers_equals_int8_by_row(isa: str) -> None:
    x = activations(9, 256, 0, 0)
    row, mixed_row = (
        product(isa, random_stored(name, 48, 256, 7), x, False) for name in ("I8_ROW", "I8_MIXED")
    )
    assert np.array_equal(row, mixed_row)


@pytest.mark.parametrize("isa", ISAS)
def test_outlier_bits_of_a_row_do_not_depend_on_other_rows(isa: str) -> None:
    x = np.concatenate([activations(5, 256, outliers, outliers) for outliers in (0, 2, 40, 0, 7)])
    weight = random_stored("I8_MIXED", 50, 256, 2)
    whole = product(isa, weight, x, False, threads=2)
    for first, last in ((0, 1), (3, 17), (20, 25)):
        assert np.array_equal(whole[first:last], product(isa, weight, x[first:last], False))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("what", [np.nan, np.inf, 3e38])
def test_outlier_rows_that_are_not_finite(isa: str, what: float) -> None:
    """Only their own results are affected; the largest finite numbers are outliers."""
    x = activations(4, 256, 2, 0)
    x[1, 17] = what
    weight = random_stored("I8_MIXED", 32, 256, 3, scale=1e-3)
    got = product(isa, weight, x, False)
    assert np.isfinite(got[[0, 2, 3]]).all()
    assert np.isfinite(got[1]).all() == (what == 3e38)
