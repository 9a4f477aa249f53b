"""Rounding weights to codes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.quant.formats import StoredTensor, plain_table
from headrace.quant.rounding import (
    best_range,
    in_groups,
    nearest_codes,
    round_to_nearest,
    to_table_rows,
)
from headrace.quant.spec import QuantSpec, dequantise_rows
from tests.tables import KINDS


def weights_of(seed: int, rows: int, cols: int) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, cols)) * np.exp(rng.normal(0, 2, (rows, 1)))).astype(
        np.float32
    )


def dequantised(codes: Any, scales: Any, zeros: Any, spec: QuantSpec) -> Any:
    """Return the values of codes in groups, with tables that the format holds exactly."""
    rows = to_table_rows(codes.reshape(len(codes), -1), scales, zeros, spec)
    return dequantise_rows(spec, rows).reshape(codes.shape)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 6), groups=st.integers(1, 3))
def test_rounding_errors_are_at_most_half_a_step(
    kind: str, seed: int, rows: int, groups: int
) -> None:
    """Errors are at most half of the widest gap, times the scale; clipped ends count
    from half a step inside.
    """
    spec = KINDS[kind]
    weights = weights_of(seed, rows, groups * (spec.group or 64))
    grouped = in_groups(weights, spec)
    scales, zeros = best_range(grouped, spec, clip=False)
    rounded = dequantised(nearest_codes(grouped, scales, zeros, spec), scales, zeros, spec)
    values = np.sort(spec.values[np.isfinite(spec.values)])
    gap = np.diff(values).max()
    # A scale is rounded, by 2^-8 at most, and a zero point by half a step: so far the ends of a
    # range may lie outside.
    outside = np.abs(grouped).max(axis=-1, keepdims=True) * 2.0**-8 + (
        np.abs(scales)[..., None] if zeros is not None else 0
    )
    if spec.zero == "none" and spec.codebook == "integer":
        outside = outside + np.abs(scales)[..., None] * 0.5
    assert np.all(np.abs(rounded - grouped) <= gap / 2 * np.abs(scales)[..., None] * 1.01 + outside)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_never_raises_errors(kind: str) -> None:
    spec, weights = KINDS[kind], weights_of(3, 8, 512)
    errors = [
        np.square(dequantise_rows(spec, round_to_nearest(weights, spec, clip=clip)) - weights).sum()
        for clip in (True, False)
    ]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_the_format_are_their_own_nearest(kind: str) -> None:
    """Packing and unpacking are inverse, up to codes of equal value."""
    spec = KINDS[kind]
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 1 << spec.bits, (4, 2, spec.group or 64), np.uint8)
    codes[~np.isfinite(spec.values)[codes]] = 0
    scales = np.full((4, 2), 0.25, np.float32)
    zeros = {
        "none": None,
        "point": np.full((4, 2), 3, np.float32),
        "minimum": np.full((4, 2), -0.5, np.float32),
    }[spec.zero]
    values = dequantised(codes, scales, zeros, spec)
    again = nearest_codes(values, scales, zeros, spec)
    np.testing.assert_array_equal(dequantised(again, scales, zeros, spec), values)


def test_a_scale_around_the_middle_with_a_minimum_is_caught() -> None:
    """A known mistake of descriptions: centred codes and a minimum at once, which is
    off by half a range.
    """
    weights = weights_of(5, 4, 128)
    symmetric, minimum = (
        QuantSpec(4, 32),
        QuantSpec(bits=4, group=32, scale="f16", zero="minimum", zero_type="f32"),
    )
    right = np.abs(dequantise_rows(minimum, round_to_nearest(weights, minimum)) - weights).max()
    rows = round_to_nearest(weights, minimum)
    wrong = rows._replace(codes=round_to_nearest(weights, symmetric).codes)
    assert np.abs(dequantise_rows(minimum, wrong) - weights).max() > 4 * right
    with pytest.raises(AssertionError):
        tables = {"scales": np.asarray(rows.scales), "zeros": np.asarray(rows.zeros)}
        StoredTensor("w", plain_table(symmetric), weights.shape, {"codes": rows.codes, **tables})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_are_zeros_and_a_last_group_may_be_short(kind: str) -> None:
    spec, zeros = KINDS[kind], np.zeros((2, 96), np.float32)
    assert not dequantise_rows(spec, round_to_nearest(zeros, spec)).any()
    weights = weights_of(7, 3, 480)
    rows = round_to_nearest(weights, spec)
    assert rows.codes.shape == weights.shape and rows.scales.shape == (3, spec.num_scales(480))
    whole = weights[:, : 480 // spec.group * spec.group] if spec.group else weights
    np.testing.assert_array_equal(
        rows.codes[:, : whole.shape[1]], round_to_nearest(whole, spec).codes
    )
