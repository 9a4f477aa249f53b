"""What each stored format means, in NumPy: the truth that the kernels are held to.

The layouts are those of ggml (`ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`); every operation is the one ggml
does, in its order and in float32, so the results are bit-equal to it. Integers are unpacked with `_fields`; a value is
`scale * q`, `scale * q + minimum` or, in the K formats of 256 values, the same with scales that are themselves quantised.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK_VALUES = 1 << 16
"""Values converted at a time: the temporaries stay in cache instead of costing several times the tensor."""


def dequantise(name: str, data: Bytes, block: int, nbytes: int) -> Floats:
    """Values of `data`, any shape, in format `name` with `block` values in `nbytes` bytes; one flat array of float32."""
    blocks = np.ascontiguousarray(data).reshape(-1, nbytes)
    convert = _CONVERT[name]
    values = np.empty((len(blocks), block), np.float32)
    chunk = _CHUNK_VALUES // block
    for start in range(0, len(blocks), chunk):
        values[start : start + chunk] = convert(blocks[start : start + chunk]).reshape(-1, block)
    return values.reshape(-1)


def _fields(packed: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Bit fields of each byte: [..., n] -> [..., len(shifts), n], field by field."""
    return (packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _half(blocks: Bytes, at: int) -> Floats:  # [blocks, 1]
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _i8(blocks: Bytes) -> Floats:
    return blocks.view(np.int8).astype(np.float32)


def _q4(blocks: Bytes, at: int) -> Bytes:  # [blocks, 32]: low nibbles are the first half of the block
    return _fields(blocks[:, at : at + 16], (0, 4), 15).reshape(-1, 32)


def _q5(blocks: Bytes, at: int) -> Bytes:  # [blocks, 32]: 32 fifth bits, then nibbles as in `_q4`
    fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _q4(blocks, at + 4) | (fifth << np.uint8(4))


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_q4(blocks, 2).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _q4(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_q5(blocks, 2).astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _q5(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16).astype(np.float32)
    scale = _half(blocks, 80) * (scales & 15).astype(np.float32)  # [blocks, 16]
    minimum = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return scale[:, :, None] * q - minimum[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16).astype(np.float32)
    third = _fields(blocks[:, :32], tuple(range(8)), 1).reshape(-1, 16, 16)
    q = low - np.float32(4) * (third ^ 1).astype(np.float32)  # a set mask bit means "no offset"
    low_scales = _fields(blocks[:, 96:104], (0, 4), 15).reshape(-1, 16)
    high_scales = _fields(blocks[:, 104:108], (0, 2, 4, 6), 3).reshape(-1, 16)
    scales = (low_scales | (high_scales << np.uint8(4))).astype(np.float32) - np.float32(32)
    return (_half(blocks, 108) * scales)[:, :, None] * q


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of Q4_K and Q5_K, times their float16 scales: two of [blocks, 8, 1]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    scale, minimum = _scales_and_minima(blocks)
    q = _fields(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    return scale * q.astype(np.float32) - minimum


def _q5_k(blocks: Bytes) -> Floats:
    scale, minimum = _scales_and_minima(blocks)
    low = _fields(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    fifth = _fields(blocks[:, 16:48], tuple(range(8)), 1)
    return scale * (low | (fifth << np.uint8(4))).astype(np.float32) - minimum


def _q6_k(blocks: Bytes) -> Floats:
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    q = (low | (high << np.uint8(4))).astype(np.float32).reshape(-1, 16, 16) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[:, :, None] * q


_CONVERT: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "I8_ROW": _i8,  # codes: the scales lie beside them
}
