"""Encoders of super-blocks of 256 values: parts are fitted alone, then the super-block's scale."""

from itertools import product
from typing import NamedTuple

import numpy as np

from headrace.quant.arrays import Bytes, Floats
from headrace.quant.block_layout import columns, half_bytes, in_rows, packed, stored_scale
from headrace.quant.fit import Grid, Integers, Table, fit_range, fit_scale, inverse
from headrace.quant.spec import CODEBOOKS


class _Parts(NamedTuple):
    scale: Floats  # [blocks], scale of the scales
    scales: Floats  # [parts, blocks], integers
    minimum: Floats  # [blocks], scale of the minima, which are subtracted
    minima: Floats  # [parts, blocks], integers
    codes: Bytes  # [blocks, 256]


def _sum(values: Floats, weights: Floats | None) -> Floats:
    result: Floats = (values if weights is None else values * weights).sum(axis=0)
    return result


def _parts(
    values: Floats,
    weights: Floats | None,
    grid: Grid,
    scale_grid: Integers,
    scales: Floats,
    minima: Floats | None = None,
) -> _Parts:
    """Quantise blocks [size, parts, blocks], given `scales` and `minima` that fit each
    part.
    """
    low = np.zeros_like(scales) if minima is None else minima
    rounded = grid.nearest((values - low) * inverse(scales))
    scale = stored_scale(fit_scale(scales, scale_grid, _sum(rounded * rounded, weights)))
    minimum_weights = None if weights is None else weights.sum(axis=0)
    minimum = stored_scale(fit_scale(-low, scale_grid, minimum_weights))

    near_scales = scale_grid.nearest(scales * inverse(scale))
    near_minima = scale_grid.nearest(-low * inverse(minimum))
    best_scales, best_minima = near_scales, near_minima
    min_errors = np.full_like(scales, np.inf)
    minimum_steps = (0,) if minima is None else (0, -1, 1)
    for scale_step, minimum_step in product((0, -1, 1), minimum_steps):
        stored_scales = scale_grid.nearest(near_scales + scale_step)
        stored_minima = scale_grid.nearest(near_minima + minimum_step)
        factors, above = scale * stored_scales, values + minimum * stored_minima
        difference = above - factors * grid.nearest(above * inverse(factors))
        errors = _sum(difference * difference, weights)
        is_better = errors < min_errors
        best_scales = np.where(is_better, stored_scales, best_scales)
        best_minima = np.where(is_better, stored_minima, best_minima)
        min_errors = np.where(is_better, errors, min_errors)

    codes = grid.codes((values + minimum * best_minima) * inverse(scale * best_scales))
    return _Parts(
        scale=scale,
        scales=best_scales,
        minimum=minimum,
        minima=best_minima,
        codes=in_rows(codes),
    )


def _scaled(
    blocks: Floats, importance: Floats | None, size: int, grid: Grid, scale_grid: Integers
) -> _Parts:
    values = columns(blocks, size)
    weights = None if importance is None else columns(importance, size)
    return _parts(values, weights, grid, scale_grid, fit_scale(values, grid, weights))


def _ranged(
    blocks: Floats, importance: Floats | None, size: int, high: int, scale_high: int
) -> _Parts:
    values = columns(blocks, size)
    weights = None if importance is None else columns(importance, size)
    scales, minima = fit_range(values, high, weights, signed=False)
    return _parts(values, weights, Integers(0, high), Integers(0, scale_high), scales, minima)


def _as_bytes(integers: Floats) -> Bytes:
    """[parts, blocks] to bytes [blocks, parts]."""
    return integers.T.astype(np.uint8)


def q2_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """2 bits, 4-bit scales and minima of 16 values."""
    parts = _ranged(blocks, importance, 16, 3, 15)
    scales = _as_bytes(parts.scales) | (_as_bytes(parts.minima) << np.uint8(4))
    low = packed(parts.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([scales, low, half_bytes(parts.scale), half_bytes(parts.minimum)], axis=1)


def q3_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """3 bits around 4, 6-bit scales of 16 values."""
    parts = _scaled(blocks, importance, 16, Integers(-4, 3), Integers(-32, 31))
    third = packed(parts.codes.reshape(-1, 8, 32), 1, at=2)
    low = packed(parts.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    scales = _as_bytes(parts.scales + np.float32(32))
    low_scales = packed(scales.reshape(-1, 2, 8), 4)
    high_scales = packed(scales.reshape(-1, 4, 4), 2, at=4)
    return np.concatenate([third, low, low_scales, high_scales, half_bytes(parts.scale)], axis=1)


def _scales_and_minima(parts: _Parts) -> Bytes:
    scales, minima = _as_bytes(parts.scales), _as_bytes(parts.minima)
    first = scales[:, :4] | (scales[:, 4:] >> np.uint8(4) << np.uint8(6))
    second = minima[:, :4] | (minima[:, 4:] >> np.uint8(4) << np.uint8(6))
    third = packed(np.stack([scales[:, 4:], minima[:, 4:]], axis=1), 4)
    return np.concatenate(
        [half_bytes(parts.scale), half_bytes(parts.minimum), first, second, third], axis=1
    )


def q4_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """4 bits, 6-bit scales and minima of 32 values."""
    parts = _ranged(blocks, importance, 32, 15, 63)
    codes = packed(parts.codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([_scales_and_minima(parts), codes], axis=1)


def q5_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """5 bits, 6-bit scales and minima of 32 values."""
    parts = _ranged(blocks, importance, 32, 31, 63)
    fifth = packed(parts.codes.reshape(-1, 8, 32), 1, at=4)
    low = packed(parts.codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([_scales_and_minima(parts), fifth, low], axis=1)


def q6_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """6 bits around 32, signed 8-bit scales of 16 values."""
    parts = _scaled(blocks, importance, 16, Integers(-32, 31), Integers(-128, 127))
    low = packed(parts.codes.reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    high = packed(parts.codes.reshape(-1, 2, 4, 32), 2, at=4).reshape(-1, 64)
    scales = parts.scales.T.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, scales, half_bytes(parts.scale)], axis=1)


def iq4_xs(blocks: Floats, importance: Floats | None) -> Bytes:
    """4 bits that are looked up, 6-bit scales of 32 values."""
    parts = _scaled(blocks, importance, 32, Table(CODEBOOKS["iq4_nl"]), Integers(-32, 31))
    scales = _as_bytes(parts.scales + np.float32(32))
    high = packed(scales.reshape(-1, 2, 4, 1), 2, at=4).reshape(-1, 2)
    low = packed(scales.reshape(-1, 4, 2, 1), 4).reshape(-1, 4)
    codes = packed(parts.codes.reshape(-1, 8, 2, 16), 4).reshape(-1, 128)
    return np.concatenate([half_bytes(parts.scale), high, low, codes], axis=1)
