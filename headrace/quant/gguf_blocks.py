"""Blocks of GGUF files that kernels read as codes with a table of scales: IQ formats, ternary ones and NVFP4.

The layouts are those of ggml (`block_iq2_xxs` and so on in `ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`). A function here takes
blocks [blocks, bytes] apart into codes [blocks, values] and scales [blocks, scales of a block], as the format's `QuantSpec` has them. In
IQ2 and IQ3 a code is the number of a magnitude and, in bit 3, its sign; in IQ1 the number of -1, 0 or 1 and, in bit 2, the sign of what is
added to it. Scales are computed in float32 as ggml does it, and a value is the product of the two, as it is there: all are bit-equal, but
for the sign of zeros in TQ1_0, TQ2_0 and NVFP4.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.quant.dequantise import Bytes, Floats, fields, half, nibbles
from headrace.quant.grids import Grid, grid
from headrace.quant.spec import TableRows, small_floats

_SEVENS = np.arange(128, dtype=np.uint8)
_EVEN_SIGNS = _SEVENS | ((np.bitwise_count(_SEVENS) & np.uint8(1)) << np.uint8(7))
"""Signs of 8 values by the first 7 of them: the number of minuses is even (`ksigns_iq2xs`)."""

_UE4M3 = np.abs(small_floats(3)).astype(np.float16)
_UE4M3[[127, 255]] = 0, 480
"""Scales of NVFP4 [256]: e4m3, whose sign counts for nothing; ggml has 0 for its NaN, and a number for the one with a sign."""


def table_rows(name: str, stored: Bytes) -> TableRows:
    """The codes of rows of blocks [rows, blocks of a row, bytes] in the format of this name.

    No check is made of scales: one that is infinite or NaN gives values that are, as it does in every format of GGUF files.
    """
    rows, blocks, nbytes = stored.shape
    with np.errstate(invalid="ignore"):
        found = _READERS[name](np.ascontiguousarray(stored).reshape(rows * blocks, nbytes))
    codes, scales = found.codes, found.scales
    return TableRows(codes.reshape(rows, blocks * codes.shape[1]), scales.reshape(rows, blocks * scales.shape[1]))


def _words(blocks: Bytes, first: int, last: int, dtype: str) -> NDArray[np.uint32]:
    """The integers of these bytes of each block."""
    return np.ascontiguousarray(blocks[:, first:last]).view(dtype).astype(np.uint32)


def _in_turn(numbers: NDArray[np.uint32] | Bytes, shifts: tuple[int, ...], mask: int) -> NDArray[np.uint32]:
    """Bit fields of each number, number by number: [blocks, n] -> [blocks, n * len(shifts)]."""
    found = (numbers.astype(np.uint32)[..., None] >> np.array(shifts, np.uint32)) & np.uint32(mask)
    return found.reshape(len(numbers), numbers.shape[1] * len(shifts))


def _signed(name: Grid, points: NDArray[np.uint32] | Bytes, signs: Bytes) -> Bytes:
    """Codes of grid points, with a byte of signs for each 8 of them: [blocks, 256]."""
    minus = np.unpackbits(signs, axis=1, bitorder="little")
    return grid(name)[points].reshape(len(points), 256) | (minus << np.uint8(3))


def _half_steps(blocks: Bytes, steps: NDArray[np.uint32], unit: float) -> Floats:
    """The scale of each block times (steps + 1/2), times a unit."""
    return half(blocks, 0) * (np.float32(0.5) + steps.astype(np.float32)) * np.float32(unit)


def _odd_steps(scale: Floats, steps: NDArray[np.uint32]) -> Floats:
    """A scale times 2 * steps + 1."""
    return scale * (np.float32(2) * steps.astype(np.float32) + np.float32(1))


def _iq2_xxs(blocks: Bytes) -> TableRows:
    """8 values: 8 bits of a point, 7 of signs; 4-bit scales of 32 values."""
    eighths = blocks[:, 2:].reshape(-1, 8, 8)
    words = _words(eighths[:, :, 4:].reshape(-1, 32), 0, 32, "<u4")
    signs = _EVEN_SIGNS[_in_turn(words, (0, 7, 14, 21), 127)]
    return TableRows(_signed("iq2_xxs", eighths[:, :, :4].reshape(-1, 32), signs), _half_steps(blocks, words >> np.uint32(28), 0.25))


def _iq2_xs(blocks: Bytes) -> TableRows:
    """8 values: 9 bits of a point, 7 of signs; 4-bit scales of 16 values."""
    words = _words(blocks, 2, 66, "<u2")
    codes = _signed("iq2_xs", words & np.uint32(511), _EVEN_SIGNS[words >> np.uint32(9)])
    return TableRows(codes, _half_steps(blocks, _in_turn(blocks[:, 66:], (0, 4), 15), 0.25))


def _iq2_s(blocks: Bytes) -> TableRows:
    """8 values: 10 bits of a point, 8 of signs; 4-bit scales of 16 values."""
    points = blocks[:, 2:34] | (_in_turn(blocks[:, 66:74], (0, 2, 4, 6), 3) << np.uint32(8))
    return TableRows(_signed("iq2_s", points, blocks[:, 34:66]), _half_steps(blocks, _in_turn(blocks[:, 74:], (0, 4), 15), 0.25))


def _iq3_xxs(blocks: Bytes) -> TableRows:
    """4 values: 8 bits of a point; 7 bits for 8 signs; 4-bit scales of 32 values."""
    words = _words(blocks, 66, 98, "<u4")
    signs = _EVEN_SIGNS[_in_turn(words, (0, 7, 14, 21), 127)]
    return TableRows(_signed("iq3_xxs", blocks[:, 2:66], signs), _half_steps(blocks, words >> np.uint32(28), 0.5))


def _iq3_s(blocks: Bytes) -> TableRows:
    """4 values: 9 bits of a point; all signs; 4-bit scales of 32 values."""
    ninth = _in_turn(blocks[:, 66:74], tuple(range(8)), 1)
    codes = _signed("iq3_s", blocks[:, 2:66] | (ninth << np.uint32(8)), blocks[:, 74:106])
    return TableRows(codes, _odd_steps(half(blocks, 0), _in_turn(blocks[:, 106:], (0, 4), 15)))


def _shifted(points: NDArray[np.uint32], minus: NDArray[np.uint32]) -> Bytes:
    """Codes of grid points of 8 values that are -1, 0 or 1, and whether 1/8 is taken away, not added: [blocks, 256]."""
    codes = grid("iq1")[points] | (minus << np.uint32(2)).astype(np.uint8)[..., None]
    return codes.reshape(len(points), 256)


def _iq1_s(blocks: Bytes) -> TableRows:
    """8 values: 11 bits of a point; a 3-bit scale and a sign for 32 values."""
    words = _words(blocks, 34, 50, "<u2")
    points = blocks[:, 2:34] | (_in_turn(words, (0, 3, 6, 9), 7) << np.uint32(8))
    codes = _shifted(points, np.repeat(words >> np.uint32(15), 4, axis=1))
    return TableRows(codes, _odd_steps(half(blocks, 0), (words >> np.uint32(12)) & np.uint32(7)))


def _iq1_m(blocks: Bytes) -> TableRows:
    """8 values: 11 bits of a point and a sign; 3-bit scales of 16 values, above which the scale of all lies in four pieces."""
    points = blocks[:, :32] | (_in_turn(blocks[:, 32:48], (0, 4), 7) << np.uint32(8))
    words = _words(blocks, 48, 56, "<u2")
    pieces = (words >> np.uint32(12)) << np.array([0, 4, 8, 12], np.uint32)
    scale = pieces.sum(axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    codes = _shifted(points, _in_turn(blocks[:, 32:48], (3, 7), 1))
    return TableRows(codes, _odd_steps(scale, _in_turn(words, (0, 3, 6, 9), 7)))


def _iq4_nl(blocks: Bytes) -> TableRows:
    """4 bits, a scale of 32 values."""
    return TableRows(nibbles(blocks, 2), half(blocks, 0).astype(np.float16))


def _iq4_xs(blocks: Bytes) -> TableRows:
    """4 bits, 6-bit scales of 32 values around 32."""
    codes = fields(blocks[:, 8:].reshape(-1, 8, 16), (0, 4), 15).reshape(-1, 256)
    high = _in_turn(_words(blocks, 2, 4, "<u2"), tuple(range(0, 16, 2)), 3)
    steps = _in_turn(blocks[:, 4:8], (0, 4), 15) | (high << np.uint32(4))
    return TableRows(codes, half(blocks, 0) * (steps.astype(np.float32) - np.float32(32)))


def _tq1_0(blocks: Bytes) -> TableRows:
    """Five values in a byte, four in the last ones: the digits of a number to the base 3, as a fraction of 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    codes = np.empty((len(blocks), 256), np.uint8)
    for first, last, at, digits in ((0, 32, 0, 5), (32, 48, 160, 5), (48, 52, 240, 4)):
        fractions, width = (blocks[:, None, first:last] * powers[:digits]).astype(np.uint16), digits * (last - first)
        codes[:, at : at + width] = (fractions * np.uint16(3) >> np.uint16(8)).reshape(len(blocks), width)
    return _around_one(codes, half(blocks, 52))


def _tq2_0(blocks: Bytes) -> TableRows:
    """2 bits, a scale of 256 values."""
    return _around_one(fields(blocks[:, :64].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256), half(blocks, 64))


def _around_one(codes: Bytes, scale: Floats) -> TableRows:
    """Codes 0 to 3 that stand for -1 to 2, as integers of 2 bits, -2 to 1: with the other sign, and so have the scales."""
    return TableRows(codes ^ np.uint8(3), -scale.astype(np.float16))


def _nvfp4(blocks: Bytes) -> TableRows:
    """4-bit floats, e4m3 scales of 16 values."""
    return TableRows(fields(blocks[:, 4:].reshape(-1, 4, 8), (0, 4), 15).reshape(-1, 64), _UE4M3[blocks[:, :4]])


_READERS: dict[str, Callable[[Bytes], TableRows]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
}
