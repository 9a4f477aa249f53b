"""2:4: two of four values are kept, and their places."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.quant.sparse import check_places, kept, largest_two, places_of, spread
from headrace.quant.spec import QuantSpec, TableRows, dequantise_rows
from tests.tables import SPARSE_KINDS, random_table


@given(rows=st.integers(1, 5), groups=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_kept_values_go_back_to_their_columns(rows: int, groups: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, 4 * groups)).astype(np.float32)
    is_kept = largest_two(np.abs(values))
    assert (is_kept.reshape(rows, groups, 4).sum(axis=2) == 2).all()
    pruned = np.where(is_kept, values, np.float32(0))
    ordered = np.sort(np.abs(values).reshape(-1, 4), axis=1)
    assert np.array_equal(np.sort(np.abs(pruned).reshape(-1, 4), axis=1)[:, 2:], ordered[:, 2:])
    assert np.array_equal(spread(kept(values, is_kept), places_of(is_kept)), pruned)


def test_the_first_of_equal_magnitudes_is_kept() -> None:
    assert largest_two(np.ones((1, 4), np.float32)).tolist() == [[True, True, False, False]]


def test_bytes_of_sparse_formats() -> None:
    """int8 takes 5 bits per weight, int4 3 and bf16 9, besides scales."""
    for spec, bits in (
        (QuantSpec(bits=8, group=0, scale="f32", is_sparse=True), 5),
        (QuantSpec(bits=8, group=128, is_sparse=True), 5),
        (QuantSpec(bits=4, group=128, is_sparse=True), 3),
        (QuantSpec(bits=16, group=0, scale="none", codebook="bf16", is_sparse=True), 9),
    ):
        scale_bytes = 48 * spec.num_scales(1024) * (4 if spec.scale == "f32" else 2)
        assert spec.table_bytes(48, 1024) == 48 * 1024 * bits // 8 + scale_bytes


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_values_equal_the_dense_ones(kind: str) -> None:
    """A dense matrix with the middle code at all other places has the same values."""
    stored, spec = random_table(kind, 9, 160, 3), SPARSE_KINDS[kind]
    values = stored.dequantise()
    assert (values.reshape(9, -1, 4) == 0).sum(axis=2).min() >= 2 and values.any()
    read = stored.format.table_rows
    assert read
    rows = read(stored.parts, slice(None))
    assert rows.places is not None
    if spec.codebook == "bf16":
        assert np.array_equal(values.view(np.uint32) >> 16, spread(rows.codes, rows.places))
        return
    middle = np.uint8(1 << spec.bits - 1)
    dense = spread(rows.codes ^ middle, rows.places) ^ middle
    expected = dequantise_rows(replace(spec, is_sparse=False), TableRows(dense, rows.scales))
    assert np.array_equal(values, expected)
    some = np.array([7, 0, 7])
    assert np.array_equal(stored.dequantise_rows(some), values[some])
    assert np.array_equal(stored.take("some", some).dequantise(), values[some])


@pytest.mark.parametrize(
    ("places", "cols", "why"),
    [
        ([[0b0011_0111]], 8, "other than two"),
        ([[0b0001_0011]], 8, "other than two"),
        ([[0b0101_0011]], 4, "other than two"),
        ([[0b0011_0011]], 16, "1 bytes a row"),
        ([[0b0011_0011]], 6, "multiple of 4"),
    ],
)
def test_damaged_places_are_refused(places: list[list[int]], cols: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_places(np.array(places, np.uint8), cols)
    with pytest.raises(ValueError, match="multiple of 4 columns"):
        largest_two(np.ones((1, 6), np.float32))
