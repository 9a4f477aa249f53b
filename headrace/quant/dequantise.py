"""The values of each stored format in NumPy: the reference for all kernels.

Layouts and order of operations are ggml's (`ggml-quants.c`), so results are bit-equal.

A `Values` function takes the parts of a stored tensor and a selection of its rows, and returns
values [selected rows, columns].
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Bytes, Floats

Parts = Mapping[str, NDArray[Any]]
Rows = slice | NDArray[np.int64]
Values = Callable[[Parts, Rows], Floats]

_CHUNK_VALUES = 1 << 16
"""Keeps temporaries in cache."""


def of_blocks(convert: Callable[[Bytes], Floats], block: int) -> Values:
    """Convert blocks [blocks, bytes] of codes [stored rows, blocks of a row, bytes]."""

    def values(parts: Parts, rows: Rows) -> Floats:
        codes = parts["codes"][rows]
        flat = np.ascontiguousarray(codes).reshape(-1, codes.shape[-1])
        result = np.empty((len(flat), block), np.float32)
        chunk = _CHUNK_VALUES // block
        for start in range(0, len(flat), chunk):
            result[start : start + chunk] = convert(flat[start : start + chunk]).reshape(-1, block)
        return result.reshape(len(codes), codes.shape[1] * block)

    return values


def row_scaled(values: Values) -> Values:
    """Multiply by the part `row_scales` [stored rows]."""
    return lambda parts, rows: values(parts, rows) * parts["row_scales"][rows, None]


def fields(packed: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Unpack bit fields: [..., n] to [..., len(shifts), n]."""
    return (packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def half(blocks: Bytes, at: int) -> Floats:  # [blocks, 1]
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def numbers(dtype: str) -> Callable[[Bytes], Floats]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def look_up(values: Floats) -> Callable[[Bytes], Floats]:
    return lambda blocks: values[blocks]


def nibbles(blocks: Bytes, at: int) -> Bytes:  # [blocks, 32]
    """The 32 codes of 16 bytes: all low nibbles, then all high nibbles."""
    return fields(blocks[:, at : at + 16], (0, 4), 15).reshape(-1, 32)


def _q5(blocks: Bytes, at: int) -> Bytes:  # [blocks, 32]
    # 32 fifth bits come before the nibbles.
    fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return nibbles(blocks, at + 4) | (fifth << np.uint8(4))


class BlockScales(NamedTuple):
    """Integers times a float16 per block."""

    super_scales: Floats  # [blocks, 1]
    sub_scales: NDArray[np.int8]  # [blocks, scales of a block]
    fraction: float = 1.0
    """A power of two that multiplies all scales."""

    @property
    def numbers(self) -> Floats:  # [blocks, scales of a block]
        with np.errstate(invalid="ignore"):
            return (
                self.super_scales * self.sub_scales.astype(np.float32) * np.float32(self.fraction)
            )


class BlockCodes(NamedTuple):
    """A value is scale * code + minimum."""

    codes: NDArray[Any]  # int8 or uint8 [blocks, scales of a block, columns that share a scale]
    scales: BlockScales
    minima: BlockScales | None = None


def block_values(split: Callable[[Bytes], BlockCodes]) -> Callable[[Bytes], Floats]:
    def values(blocks: Bytes) -> Floats:
        codes, scales, minima = split(blocks)
        with np.errstate(invalid="ignore"):
            scaled: Floats = scales.numbers[:, :, None] * codes.astype(np.float32)
            return scaled if minima is None else scaled + minima.numbers[:, :, None]

    return values


def q4_0(blocks: Bytes) -> BlockCodes:
    """4 bits around 8, and a scale."""
    return _one_scale(blocks, nibbles(blocks, 2).view(np.int8) - np.int8(8))


def q4_1(blocks: Bytes) -> BlockCodes:
    """4 bits, a scale and a minimum."""
    return _one_scale(blocks, nibbles(blocks, 4), half(blocks, 2))


def q5_0(blocks: Bytes) -> BlockCodes:
    """5 bits around 16, and a scale."""
    return _one_scale(blocks, _q5(blocks, 2).view(np.int8) - np.int8(16))


def q5_1(blocks: Bytes) -> BlockCodes:
    """5 bits, a scale and a minimum."""
    return _one_scale(blocks, _q5(blocks, 4), half(blocks, 2))


def q8_0(blocks: Bytes) -> BlockCodes:
    """Signed bytes, and a scale."""
    return _one_scale(blocks, blocks[:, 2:].view(np.int8))


def _one_scale(blocks: Bytes, codes: NDArray[Any], minima: Floats | None = None) -> BlockCodes:
    ones = np.ones((len(blocks), 1), np.int8)
    return BlockCodes(
        codes[:, None, :],
        BlockScales(half(blocks, 0), ones),
        None if minima is None else BlockScales(minima, ones),
    )


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Values of 4-bit float codes, doubled."""


def _scaled(exponents: Bytes, values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.ldexp(values, exponents.astype(np.int32) - 128)


def mxfp4(blocks: Bytes) -> Floats:
    """4-bit floats times a power of two (OCP microscaling formats, 2023)."""
    return _scaled(blocks[:, :1], _E2M1[nibbles(blocks, 1)])


def mxfp4_pairs(parts: Parts, rows: Rows) -> Floats:
    """MXFP4 with neighbours in a byte, and powers in the part `block_scales` [stored
    rows, blocks].
    """
    codes = parts["codes"][rows]
    values = _E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:2], 32)
    return _scaled(parts["block_scales"][rows][:, :, None], values).reshape(len(codes), -1)


def q2_k(blocks: Bytes) -> BlockCodes:
    """2 bits, 4-bit scales and minima of 16 values."""
    scales = blocks[:, :16]
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    minima = BlockScales(-half(blocks, 82), (scales >> 4).view(np.int8))
    return BlockCodes(codes, BlockScales(half(blocks, 80), (scales & 15).view(np.int8)), minima)


def q3_k(blocks: Bytes) -> BlockCodes:
    """3 bits around 4, 6-bit scales of 16 values."""
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    third = fields(blocks[:, :32], tuple(range(8)), 1).reshape(-1, 16, 16)
    # A set bit of the mask means that 4 is not subtracted.
    codes = low.view(np.int8) - np.int8(4) * (third ^ 1).view(np.int8)
    low_scales = fields(blocks[:, 96:104], (0, 4), 15).reshape(-1, 16)
    high_scales = fields(blocks[:, 104:108], (0, 2, 4, 6), 3).reshape(-1, 16)
    scales = (low_scales | (high_scales << np.uint8(4))).view(np.int8) - np.int8(32)
    return BlockCodes(codes, BlockScales(half(blocks, 108), scales))


def _scales_and_minima(blocks: Bytes) -> tuple[BlockScales, BlockScales]:
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (
        BlockScales(half(blocks, 0), scales.view(np.int8)),
        BlockScales(-half(blocks, 2), minima.view(np.int8)),
    )


def q4_k(blocks: Bytes) -> BlockCodes:
    """4 bits, 6-bit scales and minima of 32 values."""
    codes = fields(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    scales, minima = _scales_and_minima(blocks)
    return BlockCodes(codes, scales, minima)


def q5_k(blocks: Bytes) -> BlockCodes:
    """5 bits, 6-bit scales and minima of 32 values."""
    low = fields(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    fifth = fields(blocks[:, 16:48], tuple(range(8)), 1)
    scales, minima = _scales_and_minima(blocks)
    return BlockCodes(low | (fifth << np.uint8(4)), scales, minima)


def q6_k(blocks: Bytes) -> BlockCodes:
    """6 bits around 32, signed scales of 16 values."""
    low = fields(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 8, 32)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    codes = (low | (high << np.uint8(4))).view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    return BlockCodes(codes, BlockScales(half(blocks, 208), blocks[:, 192:208].view(np.int8)))
