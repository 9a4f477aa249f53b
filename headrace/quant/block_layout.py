"""Arrays and bytes of blocks, for the encoders of ggml's formats."""

import numpy as np

from headrace.quant.arrays import Bytes, Floats
from headrace.quant.spec import encode_numbers

_MIN_HALF = np.float32(2.0**-24)


def columns(blocks: Floats, size: int) -> Floats:
    """[blocks, values] to [size, parts, blocks]."""
    return np.ascontiguousarray(blocks.reshape(len(blocks), -1, size).transpose(2, 1, 0))


def in_rows(codes: Bytes) -> Bytes:
    """[size, parts, blocks] to [blocks, parts * size]."""
    return codes.transpose(2, 1, 0).reshape(codes.shape[2], -1)


def packed(codes: Bytes, bits: int, at: int = 0) -> Bytes:
    """Put bits `at` to `at` + `bits` of code i at bit i * `bits` of a byte.

    Codes are [..., codes, bytes], the result is [..., bytes].
    """
    fields = (codes >> np.uint8(at)) & np.uint8((1 << bits) - 1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[: codes.shape[-2], None]
    result: Bytes = np.bitwise_or.reduce(fields << shifts, axis=-2)
    return result


def as_half(numbers: Floats) -> Floats:
    """Clips to float16's range."""
    return encode_numbers(numbers, "f16").astype(np.float32)


def stored_scale(scales: Floats, min_scale: float = 0) -> Floats:
    """Round to float16; scales above `min_scale` do not become 0, as codes compensate."""
    rounded = as_half(scales)
    is_lost = (rounded == 0) & (np.abs(scales) > min_scale)
    return np.where(is_lost, np.copysign(_MIN_HALF, scales), rounded)


def half_bytes(scales: Floats) -> Bytes:
    """float16 scales [blocks] as bytes [blocks, 2]."""
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)
