"""Encoders of the formats whose blocks of 256 values have quantised scales, for parts of 16 or 32
values each.

Every part is fitted by itself first. The scale of its scales, and that of its minima, is then
fitted to what was found, each part weighing as much as its error would, and at last every part is
given the best of the stored scales and minima that are nearby.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from headrace.quant.block_layout import Bytes, Floats, columns, half, in_rows, packed, stored_scale
from headrace.quant.fit import Grid, Integers, Table, fit_range, fit_scale, inverse
from headrace.quant.spec import CODEBOOKS


class _Parts(NamedTuple):
    """Blocks of 256 values, as their format says them."""

    scale: Floats  # [blocks], of the scales
    scales: Floats  # [parts, blocks], integers
    minimum: Floats  # [blocks], of the minima, which are taken away
    minima: Floats  # [parts, blocks], integers
    codes: Bytes  # [blocks, 256]


def _sum(values: Floats, weights: Floats | None) -> Floats:
    """The sums over parts."""
    result: Floats = (values if weights is None else values * weights).sum(axis=0)
    return result


def _parts(
    values: Floats,
    weights: Floats | None,
    grid: Grid,
    scale_grid: Integers,
    scales: Floats,
    least: Floats | None = None,
) -> _Parts:
    """Blocks [size, parts, blocks] with scales and minima that are quantised, from those that fit
    each part: `scales` and `least`.
    """
    low = np.zeros_like(scales) if least is None else least
    rounded = grid.nearest((values - low) * inverse(scales))
    scale = stored_scale(fit_scale(scales, scale_grid, _sum(rounded * rounded, weights)))
    minimum = stored_scale(
        fit_scale(-low, scale_grid, None if weights is None else weights.sum(axis=0))
    )
    near_scales, near_minima = (
        scale_grid.nearest(scales * inverse(scale)),
        scale_grid.nearest(-low * inverse(minimum)),
    )
    best, lowest = near_scales, near_minima
    errors = np.full_like(scales, np.inf)
    for step, lift in product((0, -1, 1), (0,) if least is None else (0, -1, 1)):
        some_scales, some_minima = (
            scale_grid.nearest(near_scales + step),
            scale_grid.nearest(near_minima + lift),
        )
        factors, above = scale * some_scales, values + minimum * some_minima
        difference = above - factors * grid.nearest(above * inverse(factors))
        error = _sum(difference * difference, weights)
        better = error < errors
        best, lowest = np.where(better, some_scales, best), np.where(better, some_minima, lowest)
        errors = np.where(better, error, errors)
    codes = grid.codes((values + minimum * lowest) * inverse(scale * best))
    return _Parts(scale, best, minimum, lowest, in_rows(codes))


def _scaled(
    blocks: Floats, importance: Floats | None, size: int, grid: Grid, scale_grid: Integers
) -> _Parts:
    """Parts of `size` values that have scales alone."""
    values, weights = (
        columns(blocks, size),
        None if importance is None else columns(importance, size),
    )
    return _parts(values, weights, grid, scale_grid, fit_scale(values, grid, weights))


def _ranged(
    blocks: Floats, importance: Floats | None, size: int, high: int, scale_high: int
) -> _Parts:
    """Parts of `size` values that have scales and minima, integers from 0 to `scale_high`, and
    codes from 0 to `high`.
    """
    values, weights = (
        columns(blocks, size),
        None if importance is None else columns(importance, size),
    )
    return _parts(
        values,
        weights,
        Integers(0, high),
        Integers(0, scale_high),
        *fit_range(values, high, weights, signed=False),
    )


def _as_bytes(integers: Floats) -> Bytes:
    """Scales or minima [parts, blocks] as [blocks, parts]."""
    return integers.T.astype(np.uint8)


def q2_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """2 bits, 4-bit scales and minima of 16 values."""
    found = _ranged(blocks, importance, 16, 3, 15)
    scales = _as_bytes(found.scales) | (_as_bytes(found.minima) << np.uint8(4))
    low = packed(found.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([scales, low, half(found.scale), half(found.minimum)], axis=1)


def q3_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """3 bits around 4, 6-bit scales of 16 values."""
    found = _scaled(blocks, importance, 16, Integers(-4, 3), Integers(-32, 31))
    third = packed(found.codes.reshape(-1, 8, 32), 1, at=2)
    low = packed(found.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    scales = _as_bytes(found.scales + np.float32(32))
    low_scales, high_scales = (
        packed(scales.reshape(-1, 2, 8), 4),
        packed(scales.reshape(-1, 4, 4), 2, at=4),
    )
    return np.concatenate([third, low, low_scales, high_scales, half(found.scale)], axis=1)


def _scales_and_minima(found: _Parts) -> Bytes:
    """The first 16 bytes of Q4_K and Q5_K: two float16 scales, then eight 6-bit scales and
    minima.
    """
    scales, minima = _as_bytes(found.scales), _as_bytes(found.minima)
    first, second = (
        each[:, :4] | (each[:, 4:] >> np.uint8(4) << np.uint8(6)) for each in (scales, minima)
    )
    third = packed(np.stack([scales[:, 4:], minima[:, 4:]], axis=1), 4)
    return np.concatenate([half(found.scale), half(found.minimum), first, second, third], axis=1)


def q4_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """4 bits, 6-bit scales and minima of 32 values."""
    found = _ranged(blocks, importance, 32, 15, 63)
    return np.concatenate(
        [_scales_and_minima(found), packed(found.codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)],
        axis=1,
    )


def q5_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """5 bits, 6-bit scales and minima of 32 values."""
    found = _ranged(blocks, importance, 32, 31, 63)
    fifth = packed(found.codes.reshape(-1, 8, 32), 1, at=4)
    low = packed(found.codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([_scales_and_minima(found), fifth, low], axis=1)


def q6_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """6 bits around 32, signed 8-bit scales of 16 values."""
    found = _scaled(blocks, importance, 16, Integers(-32, 31), Integers(-128, 127))
    low = packed(found.codes.reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    high = packed(found.codes.reshape(-1, 2, 4, 32), 2, at=4).reshape(-1, 64)
    return np.concatenate(
        [low, high, found.scales.T.astype(np.int8).view(np.uint8), half(found.scale)], axis=1
    )


def iq4_xs(blocks: Floats, importance: Floats | None) -> Bytes:
    """4 bits that are looked up, 6-bit scales of 32 values: their high bits, then the low ones."""
    found = _scaled(blocks, importance, 32, Table(CODEBOOKS["iq4_nl"]), Integers(-32, 31))
    scales = _as_bytes(found.scales + np.float32(32))
    high, low = (
        packed(scales.reshape(-1, 2, 4, 1), 2, at=4).reshape(-1, 2),
        packed(scales.reshape(-1, 4, 2, 1), 4).reshape(-1, 4),
    )
    codes = packed(found.codes.reshape(-1, 8, 2, 16), 4).reshape(-1, 128)
    return np.concatenate([half(found.scale), high, low, codes], axis=1)
