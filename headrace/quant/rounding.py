"""Rounds weights to the nearest codes (RTN), with scales and zeros for each group."""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Bytes, Floats
from headrace.quant.spec import NUMBERS, QuantSpec, TableRows, encode_numbers, floats

_FACTORS = np.linspace(1.0, 0.5, 11, dtype=np.float32)
_MAX_CLIPPED_BITS = 4
"""Finer codes gain nothing from clipping."""


def round_to_nearest(
    weights: Floats, spec: QuantSpec, *, clip: bool = True, importance: Floats | None = None
) -> TableRows:
    """Round a matrix [rows, cols]; `clip` searches the range of each group.

    `importance` [cols] weights squared errors.
    """
    rows, cols = weights.shape
    grouped = in_groups(weights, spec)
    by_group = None if importance is None else in_groups(importance[None], spec)[0]
    scales, zeros = best_range(grouped, spec, clip=clip, importance=by_group)
    codes = nearest_codes(grouped, scales, zeros, spec).reshape(rows, -1)[:, :cols]
    return to_table_rows(codes, scales, zeros, spec)


def in_groups(weights: Floats, spec: QuantSpec) -> Floats:  # [rows, groups, columns of a group]
    rows, cols = weights.shape
    group = spec.group or cols
    return np.pad(weights, ((0, 0), (0, -cols % group))).reshape(rows, -1, group)


def best_range(
    grouped: Floats, spec: QuantSpec, *, clip: bool, importance: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """Choose scales and zeros [..., groups] of weights [..., groups, columns]."""
    scales, zeros = _range(grouped, spec, np.float32(1))
    if not clip or spec.bits > _MAX_CLIPPED_BITS:
        return scales, zeros

    min_errors = _errors(grouped, scales, zeros, spec, importance)
    for factor in _FACTORS[1:]:
        clipped_scales, clipped_zeros = _range(grouped, spec, factor)
        errors = _errors(grouped, clipped_scales, clipped_zeros, spec, importance)
        is_better = errors < min_errors
        min_errors = np.where(is_better, errors, min_errors)
        scales = np.where(is_better, clipped_scales, scales)
        if zeros is not None and clipped_zeros is not None:
            zeros = np.where(is_better, clipped_zeros, zeros)
    return scales, zeros


def nearest_codes(
    weights: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> NDArray[np.uint8]:
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    inverse = inverse[..., None]
    if spec.codebook != "integer":
        return _nearest_values(weights * inverse, spec)
    if spec.zero == "minimum" and zeros is not None:
        codes: Floats = np.rint((weights - zeros[..., None]) * inverse)
    else:
        zero = np.float32(1 << spec.bits - 1) if zeros is None else zeros[..., None]
        codes = np.rint(weights * inverse) + zero
    return np.clip(codes, 0, (1 << spec.bits) - 1).astype(np.uint8)


def dequantise_groups(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> Floats:
    values, scale = spec.values[codes], scales[..., None]
    if zeros is None:
        return values * scale
    zero = zeros[..., None]
    return (values - zero) * scale if spec.zero == "point" else values * scale + zero


def to_table_rows(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> TableRows:
    return TableRows(
        codes,
        encode_numbers(scales, spec.scale),
        None if zeros is None else encode_numbers(zeros, spec.zero_type),
    )


def _errors(
    grouped: Floats,
    scales: Floats,
    zeros: Floats | None,
    spec: QuantSpec,
    importance: Floats | None,
) -> Floats:
    codes = nearest_codes(grouped, scales, zeros, spec)
    difference = grouped - dequantise_groups(codes, scales, zeros, spec)
    weighted = difference if importance is None else difference * importance
    result: Floats = np.einsum("...k,...k->...", difference, weighted)
    return result


def _range(grouped: Floats, spec: QuantSpec, factor: np.float32) -> tuple[Floats, Floats | None]:
    if spec.zero == "none":
        maxima = np.abs(grouped).max(axis=-1) * factor
        finite = spec.values[np.isfinite(spec.values)]
        return _stored(maxima / finite.max(), spec.scale), None
    low = np.minimum(grouped.min(axis=-1), 0) * factor
    high = np.maximum(grouped.max(axis=-1), 0) * factor
    scales = _stored((high - low) / np.float32((1 << spec.bits) - 1), spec.scale)
    if spec.zero == "minimum":
        return scales, _stored(low, spec.zero_type)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return scales, np.clip(np.rint(-low * inverse), 0, (1 << spec.bits) - 1)


def _stored(numbers: Floats, number: str | None) -> Floats:
    assert number in NUMBERS, f"{number} is not a number type of tables"
    return floats(encode_numbers(np.ascontiguousarray(numbers, np.float32), number), number)


def _nearest_values(scaled: Floats, spec: QuantSpec) -> NDArray[np.uint8]:
    order = np.argsort(spec.values, kind="stable")
    order = order[np.isfinite(spec.values[order])]
    values = spec.values[order]
    borders = (values[1:] + values[:-1]) / 2
    nearest: Bytes = order.astype(np.uint8)[np.searchsorted(borders, scaled)]
    return nearest
