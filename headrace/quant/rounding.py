"""Rounds weights to the nearest codes (RTN), with scales and zeros for each group."""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Bytes, Floats
from headrace.quant.spec import NUMBERS, QuantSpec, TableRows, encode_numbers, floats

_FACTORS = np.linspace(1.0, 0.5, 11, dtype=np.float32)
_MAX_CLIPPED_BITS = 4
"""Finer codes gain nothing from clipping."""
_CACHED_VALUES = 1 << 15
"""Values whose temporary arrays fit into a cache of a core."""

_COUNTED_BORDERS = 16
"""Up to so many borders, vector comparisons with each are faster than a search."""


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
    """Choose scales and zeros [rows, groups] of weights [rows, groups, columns]."""
    rows, groups, cols = grouped.shape
    if not clip or spec.bits > _MAX_CLIPPED_BITS:
        return _range(*_extremes(grouped, -1, spec), spec)

    scales = np.empty((rows, groups), np.float32)
    zeros = None if spec.zero == "none" else np.empty_like(scales)
    step = max(1, _CACHED_VALUES // (groups * cols))
    for first in range(0, rows, step):
        chunk = grouped[first : first + step]
        # Groups are neighbours, so that one scale for each is applied to whole vectors.
        by_column = np.ascontiguousarray(chunk.reshape(-1, cols).T)
        weights = None if importance is None else np.tile(importance.T, len(chunk))
        chosen, chosen_zeros = _clipped_range(by_column, spec, weights)
        scales[first : first + step] = chosen.reshape(-1, groups)
        if zeros is not None and chosen_zeros is not None:
            zeros[first : first + step] = chosen_zeros.reshape(-1, groups)
    return scales, zeros


def nearest_codes(
    weights: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> NDArray[np.uint8]:
    """Codes [..., groups, columns] with scales and zeros [..., groups]."""
    by_group = None if zeros is None else zeros[..., None]
    return _codes(weights, scales[..., None], by_group, spec)


def round_column(
    column: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> tuple[NDArray[np.uint8], Floats]:
    """Nearest codes and their values; each number has its own scale and zero."""
    if spec.codebook == "integer":
        integers = _nearest_integers(column, scales, zeros, spec)
        return integers.astype(np.uint8), _integer_values(integers, scales, zeros, spec)
    codes = _codes(column, scales, zeros, spec)
    return codes, _values(codes, scales, zeros, spec)


def to_table_rows(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> TableRows:
    return TableRows(
        codes,
        encode_numbers(scales, spec.scale),
        None if zeros is None else encode_numbers(zeros, spec.zero_type),
    )


def _clipped_range(
    by_column: Floats, spec: QuantSpec, importance: Floats | None
) -> tuple[Floats, Floats | None]:
    """Choose scales and zeros [groups] of weights [columns, groups] by squared error."""
    low, high = _extremes(by_column, 0, spec)
    scales, zeros = _range(low, high, spec)
    min_errors = _errors(by_column, scales, zeros, spec, importance)
    for factor in _FACTORS[1:]:
        clipped_scales, clipped_zeros = _range(low * factor, high * factor, spec)
        errors = _errors(by_column, clipped_scales, clipped_zeros, spec, importance)
        is_better = errors < min_errors
        np.copyto(min_errors, errors, where=is_better)
        np.copyto(scales, clipped_scales, where=is_better)
        if zeros is not None and clipped_zeros is not None:
            np.copyto(zeros, clipped_zeros, where=is_better)
    return scales, zeros


def _errors(
    by_column: Floats,
    scales: Floats,
    zeros: Floats | None,
    spec: QuantSpec,
    importance: Floats | None,
) -> Floats:
    if spec.codebook == "integer":
        integers = _nearest_integers(by_column, scales, zeros, spec)
        values = _integer_values(integers, scales, zeros, spec)
    else:
        values = _values(_codes(by_column, scales, zeros, spec), scales, zeros, spec)
    difference = np.subtract(by_column, values, out=values)
    np.square(difference, out=difference)
    if importance is not None:
        difference *= importance
    result: Floats = difference.sum(axis=0)
    return result


def _codes(
    weights: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> NDArray[np.uint8]:
    if spec.codebook == "integer":
        return _nearest_integers(weights, scales, zeros, spec).astype(np.uint8)
    return _nearest_values(weights * _inverse(scales), spec)


def _values(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> Floats:
    values = spec.values[codes]
    if zeros is None:
        return values * scales
    return (values - zeros) * scales if spec.zero == "point" else values * scales + zeros


def _nearest_integers(
    weights: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> Floats:
    inverse = _inverse(scales)
    if spec.zero == "minimum" and zeros is not None:
        codes = weights - zeros
        codes *= inverse
        np.rint(codes, out=codes)
    else:
        codes = weights * inverse
        np.rint(codes, out=codes)
        codes += _middle(spec) if zeros is None else zeros
    np.maximum(codes, np.float32(0), out=codes)
    np.minimum(codes, np.float32((1 << spec.bits) - 1), out=codes)
    return codes


def _integer_values(codes: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec) -> Floats:
    """Replace codes by the numbers of `_values`, without a conversion to bytes."""
    if zeros is None:
        codes -= _middle(spec)
    elif spec.zero == "point":
        codes -= zeros
    codes *= scales
    if zeros is not None and spec.zero == "minimum":
        codes += zeros
    return codes


def _middle(spec: QuantSpec) -> np.float32:
    return np.float32(1 << spec.bits - 1)


def _inverse(scales: Floats) -> Floats:
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


def _extremes(weights: Floats, axis: int, spec: QuantSpec) -> tuple[Floats, Floats]:
    """The range that the codes of each group cover: from -high to high without zeros."""
    if spec.zero == "none":
        high = np.abs(weights).max(axis=axis)
        return -high, high
    return np.minimum(weights.min(axis=axis), 0), np.maximum(weights.max(axis=axis), 0)


def _range(low: Floats, high: Floats, spec: QuantSpec) -> tuple[Floats, Floats | None]:
    if spec.zero == "none":
        finite = spec.values[np.isfinite(spec.values)]
        return _stored(high / finite.max(), spec.scale), None
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
    if len(borders) > _COUNTED_BORDERS:
        nearest: Bytes = order.astype(np.uint8)[np.searchsorted(borders, scaled)]
        return nearest
    index = np.zeros(scaled.shape, np.uint8)
    for border in borders:
        index += (scaled > border).view(np.uint8)
    return order.astype(np.uint8)[index]
