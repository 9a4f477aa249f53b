"""Values to the blocks of ggml's formats: the inverse of `dequantise`, with the least squared error
that a search finds.

The layouts are those of ggml (`ggml-common.h`). An encoder takes blocks of values [blocks, values
of a block] and the importance of each value, or None, and gives [blocks, bytes]. Codes are those of
the scales as they are stored.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headrace.quant import encode_k
from headrace.quant.block_layout import (
    Bytes,
    Floats,
    as_half,
    columns,
    half,
    in_rows,
    packed,
    stored_scale,
)
from headrace.quant.fit import Grid, Integers, Table, fit_range, fit_scale, inverse
from headrace.quant.spec import CODEBOOKS, Number, encode_numbers

_CHUNK_VALUES = 1 << 16
"""Values encode_numbers at a time: what is computed of them stays in cache."""
_MOST = np.float32(1e9)
"""Values beyond are taken for it: no format with scales in float16 reaches so far, and its square
is still a float32.
"""
_MOST_BF16 = np.float32(3.3895e38)
_LEAST_SCALE = 2.0**-28
"""Below it 0 is nearer to the values of a block than those of a table without 0, times the least
float16.
"""
_LEAST_IMPORTANCE = np.float32(1e-4)
"""Of a column, as a part of their mean: none is left to chance."""
_MOST_POWER = 252
"""The largest exponent of MXFP4 whose values are all float32."""
_E2M1 = Table([2 * value for value in CODEBOOKS["e2m1"]])
_TRITS = 3 ** np.arange(5)[::-1, None]


class Encoder(NamedTuple):
    """How blocks of a format are made."""

    block: int
    encode: Callable[[Floats, Floats | None], Bytes]


def encode(
    name: str, values: Floats, importance: Floats | None = None
) -> Bytes:  # [rows, cols // block, nbytes]
    """Rows of values [rows, cols] in a format of `ENCODERS`, whose block divides the columns.

    `importance` says how much an error in each column counts [cols]: the mean square of what it is
    multiplied with. Values that are too large for the format become its largest. Raises ValueError
    for values that are not finite.
    """
    encoder, (num_rows, cols) = ENCODERS[name], values.shape
    assert cols % encoder.block == 0, f"{name}: {cols} columns"
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, encoder.block)
    weights = None if importance is None else _weights(importance).reshape(-1, encoder.block)
    made = []
    step = _CHUNK_VALUES // encoder.block
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        if not np.isfinite(chunk).all():
            raise ValueError("values that are not finite")
        made.append(
            encoder.encode(
                chunk,
                None
                if weights is None
                else weights[np.arange(first, first + len(chunk)) % len(weights)],
            )
        )
    return np.concatenate(made).reshape(num_rows, cols // encoder.block, -1)


def _weights(importance: Floats) -> Floats:
    """Importance with a mean of 1, or so."""
    mean = importance.mean(dtype=np.float64)
    relative = importance / mean if mean > 0 else np.ones_like(importance)
    return np.maximum(relative, _LEAST_IMPORTANCE).astype(np.float32)


def _numbers(number: Number, most: np.float32) -> Encoder:
    """Values one by one; those beyond `most` become it."""

    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        return encode_numbers(np.clip(blocks, -most, most), number).view(np.uint8)

    return Encoder(1, convert)


def _limited(block: int, convert: Callable[[Floats, Floats | None], Bytes]) -> Encoder:
    return Encoder(
        block, lambda blocks, importance: convert(np.clip(blocks, -_MOST, _MOST), importance)
    )


def _scaled(grid: Grid, block: int, pack: Callable[[Bytes, Bytes], Bytes]) -> Encoder:
    """Codes times a scale; `pack` puts the bytes of scales and the codes [blocks, block]
    together.
    """

    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        values = columns(blocks, block)
        scales = stored_scale(
            fit_scale(values, grid, None if importance is None else columns(importance, block)),
            _LEAST_SCALE,
        )
        return pack(half(scales[0]), in_rows(grid.codes(values * inverse(scales))))

    return _limited(block, convert)


def _ranged(high: int, pack: Callable[[Bytes, Bytes], Bytes]) -> Encoder:
    """Codes from 0, times a scale, and a minimum."""

    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        values = columns(blocks, 32)
        weights = None if importance is None else columns(importance, 32)
        scales, minima = fit_range(values, high, weights, signed=True)
        scales, minima = stored_scale(scales), as_half(minima)
        codes = Integers(0, high).codes((values - minima) * inverse(scales))
        return pack(np.concatenate([half(scales[0]), half(minima[0])], axis=1), in_rows(codes))

    return _limited(32, convert)


def _nibbles(
    codes: Bytes,
) -> Bytes:  # [blocks, 32] to [blocks, 16]: low nibbles are the first half of the block
    return packed(codes.reshape(-1, 2, 16), 4)


def _q4(head: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q5(head: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate(
        [head, np.packbits(codes >> 4, axis=1, bitorder="little"), _nibbles(codes)], axis=1
    )


def _q8_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """Signed bytes, of the whole range of a block as ggml has them."""
    scales = stored_scale(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127))
    codes = Integers(-127, 127).nearest(blocks * inverse(scales))
    return np.concatenate([half(scales), codes.astype(np.int8).view(np.uint8)], axis=1)


def _mxfp4(blocks: Floats, importance: Floats | None) -> Bytes:
    """4-bit floats times a power of two: that with which the largest code is reached, or one beside
    it.
    """
    plain = np.frexp(np.abs(blocks).max(axis=1, keepdims=True))[1] + 124
    powers, errors = plain, np.full(plain.shape, np.inf, np.float32)
    for step in (0, -1, 1):
        candidate = np.clip(plain + step, 0, _MOST_POWER)
        scaled = np.ldexp(blocks, 128 - candidate)
        squares = np.square(scaled - _E2M1.nearest(scaled))
        error = (squares if importance is None else squares * importance).sum(axis=1, keepdims=True)
        error = np.ldexp(error, 2 * (candidate - plain))
        better = error < errors
        powers, errors = np.where(better, candidate, powers), np.where(better, error, errors)
    return np.concatenate(
        [powers.astype(np.uint8), _nibbles(_E2M1.codes(np.ldexp(blocks, 128 - powers)))], axis=1
    )


def _tq1_0(head: Bytes, codes: Bytes) -> Bytes:
    """Five codes of three values in a byte, as a fraction of 243 in 256ths, the first of them
    largest; four in the last bytes.
    """
    parts = (
        codes[:, :160].reshape(-1, 5, 32),
        codes[:, 160:240].reshape(-1, 5, 16),
        codes[:, 240:].reshape(-1, 4, 4),
    )
    numbers = np.concatenate(
        [(part * _TRITS[: part.shape[1]]).sum(axis=1) for part in parts], axis=1
    )
    return np.concatenate([((numbers * 256 + 242) // 243).astype(np.uint8), head], axis=1)


def _tq2_0(head: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate([packed(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64), head], axis=1)


ENCODERS = {
    "F32": _numbers("f32", np.finfo(np.float32).max),
    "F16": _numbers("f16", np.float32(65504)),
    "BF16": _numbers("bf16", _MOST_BF16),
    "Q4_0": _scaled(Integers(-8, 7), 32, _q4),
    "Q4_1": _ranged(15, _q4),
    "Q5_0": _scaled(Integers(-16, 15), 32, _q5),
    "Q5_1": _ranged(31, _q5),
    "Q8_0": _limited(32, _q8_0),
    "Q2_K": _limited(256, encode_k.q2_k),
    "Q3_K": _limited(256, encode_k.q3_k),
    "Q4_K": _limited(256, encode_k.q4_k),
    "Q5_K": _limited(256, encode_k.q5_k),
    "Q6_K": _limited(256, encode_k.q6_k),
    "IQ4_NL": _scaled(Table(CODEBOOKS["iq4_nl"]), 32, _q4),
    "IQ4_XS": _limited(256, encode_k.iq4_xs),
    "MXFP4": Encoder(32, _mxfp4),
    "TQ1_0": _scaled(Integers(-1, 1), 256, _tq1_0),
    "TQ2_0": _scaled(Integers(-1, 1), 256, _tq2_0),
}
"""By the name of the format."""
