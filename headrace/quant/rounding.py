"""Weights to codes: scales and zeros of each group, and rounding to the nearest (RTN).

The range of a group may be clipped: a narrower one loses its ends and gains everywhere else. It is
searched for by the squared error, with the scales as they will be stored.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.spec import NUMBERS, QuantSpec, TableRows, encode_numbers, floats

Floats = NDArray[np.float32]

_FACTORS = np.linspace(1.0, 0.5, 11, dtype=np.float32)
"""Parts of a group's range that are tried, the whole first."""
_MOST_CLIPPED = 4
"""Bits of a code up to which the range is searched: finer ones gain nothing by it."""


def round_to_nearest(
    weights: Floats, spec: QuantSpec, *, clip: bool = True, importance: Floats | None = None
) -> TableRows:
    """The codes of a matrix [rows, cols], whose values lie within half a step of the weights inside
    the range; `clip` searches for it.

    `importance` [cols] is what the squared errors of each column count in that search. The last
    group of a row may have fewer columns than the others.
    """
    rows, cols = weights.shape
    grouped = in_groups(weights, spec)
    scales, zeros = best_range(
        grouped,
        spec,
        clip=clip,
        importance=None if importance is None else in_groups(importance[None], spec)[0],
    )
    codes = nearest_codes(grouped, scales, zeros, spec).reshape(rows, -1)[:, :cols]
    return to_table_rows(codes, scales, zeros, spec)


def in_groups(weights: Floats, spec: QuantSpec) -> Floats:  # [rows, groups, columns of a group]
    """The weights by groups; zeros fill the last one, which are in every range."""
    rows, cols = weights.shape
    group = spec.group or cols
    return np.pad(weights, ((0, 0), (0, -cols % group))).reshape(rows, -1, group)


def best_range(
    grouped: Floats, spec: QuantSpec, *, clip: bool, importance: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """Scales and zeros [..., groups] of weights [..., groups, columns], as they come out of being
    stored.

    `importance` [groups, columns] is what squared errors count; all the same without it.
    """
    best = _range(grouped, spec, np.float32(1))
    if not clip or spec.bits > _MOST_CLIPPED:
        return best
    scales, zeros = best
    least = _errors(grouped, scales, zeros, spec, importance)
    for factor in _FACTORS[1:]:
        other, other_zeros = _range(grouped, spec, factor)
        error = _errors(grouped, other, other_zeros, spec, importance)
        better = error < least
        least = np.where(better, error, least)
        scales = np.where(better, other, scales)
        if zeros is not None and other_zeros is not None:
            zeros = np.where(better, other_zeros, zeros)
    return scales, zeros


def nearest_codes(
    weights: Floats, scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> NDArray[np.uint8]:
    """The codes [..., groups, columns] whose values are nearest; `scales` and `zeros` are [...,
    groups].
    """
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)[
        ..., None
    ]
    if spec.codebook != "integer":
        return _nearest_values(weights * inverse, spec)
    if spec.zero == "minimum" and zeros is not None:
        codes: Floats = np.rint((weights - zeros[..., None]) * inverse)
    else:
        codes = np.rint(weights * inverse) + (
            np.float32(1 << spec.bits - 1) if zeros is None else zeros[..., None]
        )
    return np.clip(codes, 0, (1 << spec.bits) - 1).astype(np.uint8)


def dequantise_groups(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> Floats:
    """What codes [..., groups, columns] stand for."""
    values = spec.values[codes]
    if zeros is None:
        return values * scales[..., None]
    return (
        (values - zeros[..., None]) * scales[..., None]
        if spec.zero == "point"
        else values * scales[..., None] + zeros[..., None]
    )


def to_table_rows(
    codes: NDArray[np.uint8], scales: Floats, zeros: Floats | None, spec: QuantSpec
) -> TableRows:
    """Codes with their tables as they are stored."""
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
    difference = grouped - dequantise_groups(
        nearest_codes(grouped, scales, zeros, spec), scales, zeros, spec
    )
    result: Floats = np.einsum(
        "...k,...k->...", difference, difference if importance is None else difference * importance
    )
    return result


def _range(grouped: Floats, spec: QuantSpec, factor: np.float32) -> tuple[Floats, Floats | None]:
    """Scales and zeros for a part of the range of each group."""
    if spec.zero == "none":
        top = np.abs(grouped).max(axis=-1) * factor
        finite = spec.values[np.isfinite(spec.values)]
        return _stored(top / finite.max(), spec.scale), None
    low = np.minimum(grouped.min(axis=-1), 0) * factor
    high = np.maximum(grouped.max(axis=-1), 0) * factor
    scales = _stored((high - low) / np.float32((1 << spec.bits) - 1), spec.scale)
    if spec.zero == "minimum":
        return scales, _stored(low, spec.zero_type)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return scales, np.clip(np.rint(-low * inverse), 0, (1 << spec.bits) - 1)


def _stored(numbers: Floats, number: str | None) -> Floats:
    assert number in NUMBERS, f"{number} is no number of a table"
    return floats(encode_numbers(np.ascontiguousarray(numbers, np.float32), number), number)


def _nearest_values(scaled: Floats, spec: QuantSpec) -> NDArray[np.uint8]:
    order = np.argsort(spec.values, kind="stable")
    order = order[np.isfinite(spec.values[order])]
    values = spec.values[order]
    nearest: NDArray[np.uint8] = order.astype(np.uint8)[
        np.searchsorted((values[1:] + values[:-1]) / 2, scaled)
    ]
    return nearest
