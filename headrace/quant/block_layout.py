"""How blocks of values and of codes lie in arrays and in bytes: what the encoders of ggml's formats
share.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.spec import encode_numbers

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_LEAST_HALF = np.float32(2.0**-24)


def columns(blocks: Floats, size: int) -> Floats:
    """Blocks [blocks, values] by parts that have their own scales: [size, parts, blocks]."""
    return np.ascontiguousarray(blocks.reshape(len(blocks), -1, size).transpose(2, 1, 0))


def in_rows(codes: Bytes) -> Bytes:
    """Codes [size, parts, blocks] in the order of the values: [blocks, parts * size]."""
    return codes.transpose(2, 1, 0).reshape(codes.shape[2], -1)


def packed(codes: Bytes, bits: int, at: int = 0) -> Bytes:
    """So many bits of each code, from bit `at`: codes [..., codes of a byte, bytes] as bytes [...,
    bytes], the first code lowest.
    """
    fields = (codes >> np.uint8(at)) & np.uint8((1 << bits) - 1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[: codes.shape[-2], None]
    result: Bytes = np.bitwise_or.reduce(fields << shifts, axis=-2)
    return result


def as_half(numbers: Floats) -> Floats:
    """Numbers as float16 has them: those beyond it become its largest."""
    return encode_numbers(numbers, "f16").astype(np.float32)


def stored_scale(scales: Floats, least: float = 0) -> Floats:
    """Scales as float16 has them. Those that are too small for it, and above `least`, become its
    least and not 0: codes make up for it.
    """
    rounded = as_half(scales)
    return np.where(
        (rounded == 0) & (np.abs(scales) > least), np.copysign(_LEAST_HALF, scales), rounded
    )


def half(scales: Floats) -> Bytes:
    """The bytes of float16 scales [blocks]: [blocks, 2]."""
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)
