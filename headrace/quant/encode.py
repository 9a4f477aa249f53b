"""Encodes values as blocks of ggml's formats (`ggml-common.h`).

An encoder takes blocks [blocks, values] and their importance or None, and returns [blocks,
bytes].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headrace.quant import encode_k
from headrace.quant.arrays import Bytes, Floats
from headrace.quant.block_layout import (
    as_half,
    columns,
    half_bytes,
    in_rows,
    packed,
    stored_scale,
)
from headrace.quant.fit import Grid, Integers, Table, fit_range, fit_scale, inverse
from headrace.quant.spec import CODEBOOKS, Number, encode_numbers

_CHUNK_VALUES = 1 << 16
_MAX_VALUE = np.float32(1e9)
"""Values beyond it are clipped: its square is a float32."""
_MAX_BF16 = np.float32(3.3895e38)
_MIN_SCALE = 2.0**-28
_MIN_IMPORTANCE = np.float32(1e-4)
_MAX_POWER = 252
"""Maximum exponent of MXFP4 whose values are all float32."""
_E2M1 = Table([2 * value for value in CODEBOOKS["e2m1"]])
_TRITS = 3 ** np.arange(5)[::-1, None]


class Encoder(NamedTuple):
    block: int
    encode: Callable[[Floats, Floats | None], Bytes]


def encode(name: str, values: Floats, importance: Floats | None = None) -> Bytes:
    """Encode rows [rows, cols] as [rows, cols // block, nbytes].

    `importance` [cols], the mean square of each column's input, weights squared errors. Raises
    ValueError for a value that is not finite.
    """
    encoder, (num_rows, cols) = ENCODERS[name], values.shape
    assert cols % encoder.block == 0, f"{name}: {cols} columns"
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, encoder.block)
    weights = None if importance is None else _weights(importance).reshape(-1, encoder.block)
    encoded = []
    step = _CHUNK_VALUES // encoder.block
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        if not np.isfinite(chunk).all():
            raise ValueError("a value is not finite")
        chunk_weights = None
        if weights is not None:
            chunk_weights = weights[np.arange(first, first + len(chunk)) % len(weights)]
        encoded.append(encoder.encode(chunk, chunk_weights))
    return np.concatenate(encoded).reshape(num_rows, cols // encoder.block, -1)


def _weights(importance: Floats) -> Floats:
    mean = importance.mean(dtype=np.float64)
    relative = importance / mean if mean > 0 else np.ones_like(importance)
    return np.maximum(relative, _MIN_IMPORTANCE).astype(np.float32)


def _numbers(number: Number, max_value: np.float32) -> Encoder:

    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        return encode_numbers(np.clip(blocks, -max_value, max_value), number).view(np.uint8)

    return Encoder(1, convert)


def _limited(block: int, convert: Callable[[Floats, Floats | None], Bytes]) -> Encoder:
    def convert_clipped(blocks: Floats, importance: Floats | None) -> Bytes:
        return convert(np.clip(blocks, -_MAX_VALUE, _MAX_VALUE), importance)

    return Encoder(block, convert_clipped)


def _scaled(grid: Grid, block: int, pack: Callable[[Bytes, Bytes], Bytes]) -> Encoder:
    """Codes and a scale; `pack` joins the bytes of scales with the codes [blocks, block]."""

    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        values = columns(blocks, block)
        weights = None if importance is None else columns(importance, block)
        scales = stored_scale(fit_scale(values, grid, weights), _MIN_SCALE)
        return pack(half_bytes(scales[0]), in_rows(grid.codes(values * inverse(scales))))

    return _limited(block, convert)


def _ranged(high: int, pack: Callable[[Bytes, Bytes], Bytes]) -> Encoder:
    def convert(blocks: Floats, importance: Floats | None) -> Bytes:
        values = columns(blocks, 32)
        weights = None if importance is None else columns(importance, 32)
        scales, minima = fit_range(values, high, weights, signed=True)
        scales, minima = stored_scale(scales), as_half(minima)
        codes = Integers(0, high).codes((values - minima) * inverse(scales))
        head = np.concatenate([half_bytes(scales[0]), half_bytes(minima[0])], axis=1)
        return pack(head, in_rows(codes))

    return _limited(32, convert)


def _nibbles(codes: Bytes) -> Bytes:
    return packed(codes.reshape(-1, 2, 16), 4)


def _q4(head: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate([head, _nibbles(codes)], axis=1)


def _q5(head: Bytes, codes: Bytes) -> Bytes:
    fifth_bits = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([head, fifth_bits, _nibbles(codes)], axis=1)


def _q8_0(blocks: Floats, importance: Floats | None) -> Bytes:
    scales = stored_scale(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127))
    codes = Integers(-127, 127).nearest(blocks * inverse(scales))
    return np.concatenate([half_bytes(scales), codes.astype(np.int8).view(np.uint8)], axis=1)


def _mxfp4(blocks: Floats, importance: Floats | None) -> Bytes:
    plain = np.frexp(np.abs(blocks).max(axis=1, keepdims=True))[1] + 124
    powers, min_errors = plain, np.full(plain.shape, np.inf, np.float32)
    for step in (0, -1, 1):
        candidate = np.clip(plain + step, 0, _MAX_POWER)
        scaled = np.ldexp(blocks, 128 - candidate)
        squares = np.square(scaled - _E2M1.nearest(scaled))
        weighted = squares if importance is None else squares * importance
        errors = np.ldexp(weighted.sum(axis=1, keepdims=True), 2 * (candidate - plain))
        is_better = errors < min_errors
        powers = np.where(is_better, candidate, powers)
        min_errors = np.where(is_better, errors, min_errors)
    codes = _E2M1.codes(np.ldexp(blocks, 128 - powers))
    return np.concatenate([powers.astype(np.uint8), _nibbles(codes)], axis=1)


def _tq1_0(head: Bytes, codes: Bytes) -> Bytes:
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
    "BF16": _numbers("bf16", _MAX_BF16),
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
