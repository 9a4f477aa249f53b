"""GGUF's blocks of looked-up codes and tables.

Values are bit-equal to ggml's (`ggml-common.h`), except the sign of zeros in TQ1_0, TQ2_0 and
NVFP4.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Bytes, Floats
from headrace.quant.dequantise import BlockCodes, BlockScales, fields, half, nibbles
from headrace.quant.grids import Grid, grid
from headrace.quant.spec import CODEBOOKS, Codebook, TableRows, small_floats

Integers = NDArray[np.int8]

_SEVENS = np.arange(128, dtype=np.uint8)
_EVEN_SIGNS = _SEVENS | ((np.bitwise_count(_SEVENS) & np.uint8(1)) << np.uint8(7))
"""Signs of 8 values by 7 bits (`ksigns_iq2xs`)."""

_UE4M3 = np.abs(small_floats(3)).astype(np.float16)
_UE4M3[[127, 255]] = 0, 480
"""NVFP4's scales [256], with ggml's values for NaNs."""


def integers(name: str) -> Integers:
    return _INTEGERS[name]()


def split(name: str, blocks: Bytes) -> BlockCodes:
    """From blocks [blocks, bytes]."""
    with np.errstate(invalid="ignore"):
        return _LOOKUPS[name](blocks)


def table_rows(name: str, stored: Bytes) -> TableRows:
    """From [rows, blocks of a row, bytes]."""
    rows, blocks, nbytes = stored.shape
    with np.errstate(invalid="ignore"):
        codes, scales, _, _ = _TABLES[name](
            np.ascontiguousarray(stored).reshape(rows * blocks, nbytes)
        )
    return TableRows(
        codes.reshape(rows, blocks * codes.shape[1]), scales.reshape(rows, blocks * scales.shape[1])
    )


def _words(blocks: Bytes, first: int, last: int, dtype: str) -> NDArray[np.uint32]:
    return np.ascontiguousarray(blocks[:, first:last]).view(dtype).astype(np.uint32)


def _in_turn(
    numbers: NDArray[np.uint32] | Bytes, shifts: tuple[int, ...], mask: int
) -> NDArray[np.uint32]:
    shifted = numbers.astype(np.uint32)[..., None] >> np.array(shifts, np.uint32)
    return (shifted & np.uint32(mask)).reshape(len(numbers), numbers.shape[1] * len(shifts))


@cache
def _points(codebook: Codebook, name: Grid) -> Integers:
    return np.array(CODEBOOKS[codebook], np.int8)[grid(name)]


@cache
def _eightfold() -> Integers:
    return (grid("iq1").astype(np.int8) - np.int8(1)) * np.int8(8)


def _signed(points: Integers, signs: Bytes) -> Integers:
    codes = points.reshape(len(points), 256)
    return np.where(np.unpackbits(signs, axis=1, bitorder="little"), -codes, codes)


def _scaled(codes: Integers, scales: BlockScales) -> BlockCodes:
    return BlockCodes(codes.reshape(*scales.sub_scales.shape, -1), scales)


def _odd(numbers: NDArray[np.uint32]) -> Integers:
    return (np.uint32(2) * numbers + np.uint32(1)).astype(np.int8)


def _eighths(scale: Floats, sub_scales: Integers) -> BlockScales:
    return BlockScales(scale, sub_scales, 0.125)


def _iq2_xxs(blocks: Bytes) -> BlockCodes:
    eighths = blocks[:, 2:].reshape(-1, 8, 8)
    words = _words(eighths[:, :, 4:].reshape(-1, 32), 0, 32, "<u4")
    signs = _EVEN_SIGNS[_in_turn(words, (0, 7, 14, 21), 127)]
    points = integers("IQ2_XXS")[eighths[:, :, :4].reshape(-1, 32)]
    return _scaled(_signed(points, signs), _eighths(half(blocks, 0), _odd(words >> np.uint32(28))))


def _iq2_xs(blocks: Bytes) -> BlockCodes:
    words = _words(blocks, 2, 66, "<u2")
    codes = _signed(integers("IQ2_XS")[words & np.uint32(511)], _EVEN_SIGNS[words >> np.uint32(9)])
    return _scaled(codes, _eighths(half(blocks, 0), _odd(_in_turn(blocks[:, 66:], (0, 4), 15))))


def _iq2_s(blocks: Bytes) -> BlockCodes:
    points = blocks[:, 2:34] | (_in_turn(blocks[:, 66:74], (0, 2, 4, 6), 3) << np.uint32(8))
    codes = _signed(integers("IQ2_S")[points], blocks[:, 34:66])
    return _scaled(codes, _eighths(half(blocks, 0), _odd(_in_turn(blocks[:, 74:], (0, 4), 15))))


def _iq3_xxs(blocks: Bytes) -> BlockCodes:
    words = _words(blocks, 66, 98, "<u4")
    signs = _EVEN_SIGNS[_in_turn(words, (0, 7, 14, 21), 127)]
    codes = _signed(integers("IQ3_XXS")[blocks[:, 2:66]], signs)
    return _scaled(codes, _eighths(half(blocks, 0), np.int8(2) * _odd(words >> np.uint32(28))))


def _iq3_s(blocks: Bytes) -> BlockCodes:
    ninth = _in_turn(blocks[:, 66:74], tuple(range(8)), 1)
    codes = _signed(integers("IQ3_S")[blocks[:, 2:66] | (ninth << np.uint32(8))], blocks[:, 74:106])
    return _scaled(codes, BlockScales(half(blocks, 0), _odd(_in_turn(blocks[:, 106:], (0, 4), 15))))


def _shifted(points: NDArray[np.uint32], minus: NDArray[np.uint32]) -> Integers:
    codes = _eightfold()[points] + np.where(minus, np.int8(-1), np.int8(1))[..., None]
    return codes.reshape(len(points), 256)


def _iq1_s(blocks: Bytes) -> BlockCodes:
    words = _words(blocks, 34, 50, "<u2")
    points = blocks[:, 2:34] | (_in_turn(words, (0, 3, 6, 9), 7) << np.uint32(8))
    codes = _shifted(points, np.repeat(words >> np.uint32(15), 4, axis=1))
    return _scaled(codes, _eighths(half(blocks, 0), _odd((words >> np.uint32(12)) & np.uint32(7))))


def _iq1_m(blocks: Bytes) -> BlockCodes:
    points = blocks[:, :32] | (_in_turn(blocks[:, 32:48], (0, 4), 7) << np.uint32(8))
    words = _words(blocks, 48, 56, "<u2")
    pieces = (words >> np.uint32(12)) << np.array([0, 4, 8, 12], np.uint32)
    scale = pieces.sum(axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    codes = _shifted(points, _in_turn(blocks[:, 32:48], (3, 7), 1))
    return _scaled(codes, _eighths(scale, _odd(_in_turn(words, (0, 3, 6, 9), 7))))


def _iq4_nl(blocks: Bytes) -> TableRows:
    return TableRows(nibbles(blocks, 2), half(blocks, 0).astype(np.float16))


def _iq4_xs(blocks: Bytes) -> BlockCodes:
    nibble_codes = fields(blocks[:, 8:].reshape(-1, 8, 16), (0, 4), 15).reshape(-1, 256)
    high = _in_turn(_words(blocks, 2, 4, "<u2"), tuple(range(0, 16, 2)), 3)
    sub_scales = (_in_turn(blocks[:, 4:8], (0, 4), 15) | (high << np.uint32(4))).astype(np.int8)
    scales = BlockScales(half(blocks, 0), sub_scales - np.int8(32))
    return _scaled(integers("IQ4_XS")[nibble_codes], scales)


def _tq1_0(blocks: Bytes) -> TableRows:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    codes = np.empty((len(blocks), 256), np.uint8)
    for first, last, start, digits in ((0, 32, 0, 5), (32, 48, 160, 5), (48, 52, 240, 4)):
        fractions = (blocks[:, None, first:last] * powers[:digits]).astype(np.uint16)
        width = digits * (last - first)
        trits = (fractions * np.uint16(3) >> np.uint16(8)).reshape(len(blocks), width)
        codes[:, start : start + width] = trits
    return _around_one(codes, half(blocks, 52))


def _tq2_0(blocks: Bytes) -> TableRows:
    codes = fields(blocks[:, :64].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)
    return _around_one(codes, half(blocks, 64))


def _around_one(codes: Bytes, scale: Floats) -> TableRows:
    return TableRows(codes ^ np.uint8(3), -scale.astype(np.float16))


def _nvfp4(blocks: Bytes) -> TableRows:
    codes = fields(blocks[:, 4:].reshape(-1, 4, 8), (0, 4), 15).reshape(-1, 64)
    return TableRows(codes, _UE4M3[blocks[:, :4]])


_INTEGERS: dict[str, Callable[[], Integers]] = {
    "IQ1_S": _eightfold,
    "IQ1_M": _eightfold,
    "IQ2_XXS": partial(_points, "iq2", "iq2_xxs"),
    "IQ2_XS": partial(_points, "iq2", "iq2_xs"),
    "IQ2_S": partial(_points, "iq2", "iq2_s"),
    "IQ3_XXS": partial(_points, "iq3_xxs", "iq3_xxs"),
    "IQ3_S": partial(_points, "iq3_s", "iq3_s"),
    "IQ4_XS": partial(np.array, CODEBOOKS["iq4_nl"], np.int8),
}
_LOOKUPS: dict[str, Callable[[Bytes], BlockCodes]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_XS": _iq4_xs,
}
_TABLES: dict[str, Callable[[Bytes], TableRows]] = {
    "IQ4_NL": _iq4_nl,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
}
