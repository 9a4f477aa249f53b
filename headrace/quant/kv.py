"""Number formats of keys and values: their bytes, and what a cache in each of them gives back."""

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend_traits import KvDtype

BLOCK_SIZE = 32
"""Tokens of a block in the native cache."""

_BITS = {"int8": 8, "int4": 4}

Floats = NDArray[np.float64]


def block_bytes(dtype: KvDtype, key_dim: int, value_dim: int) -> int:
    """Bytes of one block, its K and V, of one layer and KV head, with scales and padding
    (csrc/kernels.h, `KvRecord`).

    A `value_dim` of 0 stands for values that are part of the keys. In fp8, which GPUs alone keep,
    there is a float32 for each vector.
    """
    if dtype == "fp8":
        return BLOCK_SIZE * sum(dim + 4 for dim in (key_dim, value_dim) if dim)
    return _native.kv_block_bytes(dtype, key_dim, value_dim)


def stored(x: Floats, dtype: KvDtype) -> Floats:
    """Keys or values [..., numbers of one] as attention reads them again: rounded to bf16, scaled
    and rounded to fp8, or rotated and quantised.

    Values that are part of keys are the first numbers of what this gives for the keys.
    """
    if dtype == "f32":
        return x
    if dtype == "bf16":
        return round_bf16(x)
    if dtype == "fp8":
        return _scaled_e4m3(x)
    rotation = hadamard(x.shape[-1])
    return _quantised(x @ rotation, _BITS[dtype]) @ rotation


def round_bf16(x: Floats) -> Floats:
    """Nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return _from_bits(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


def _scaled_e4m3(x: Floats) -> Floats:
    """Numbers in E4M3, rounded to the nearest, ties to even, times a float32 by which the largest
    of each vector is 448 in it.
    """
    numbers = x.astype(np.float32)
    scale = np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(448)
    scaled = (numbers / np.where(scale > 0, scale, np.float32(1))).astype(np.float64)
    step = np.ldexp(
        1.0, np.maximum(np.frexp(scaled)[1] - 1, -6) - 3
    )  # between neighbours; the least normal exponent is -6
    rounded: Floats = np.rint(scaled / step) * step * scale
    return rounded


def hadamard(n: int) -> Floats:
    """Walsh-Hadamard matrices [n, n] along the diagonal, of the largest power of two that divides
    n; its own inverse.

    Turned by it, no dimension of a key stands out, and the range of a head serves all of them
    (QuaRot, Ashkboos et al. 2024).
    """
    size = n & -n
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(n // size), block / np.sqrt(size))


def _quantised(x: Floats, bits: int) -> Floats:
    """Codes over the range of each vector; its least number and its step are bf16, rounded
    outwards.
    """
    levels = 2**bits - 1
    least = -_bf16_above(-x.min(axis=-1, keepdims=True))
    step = _bf16_above((x.max(axis=-1, keepdims=True) - least) / levels)
    codes = np.rint((x - least) / np.where(step > 0, step, 1))
    return codes * step + least


def _bf16_above(x: Floats) -> Floats:
    """The least bfloat16 that is not below x."""
    bits = x.astype(np.float32).view(np.uint32)
    return _from_bits(np.where(x > 0, bits + np.uint32(0xFFFF), bits))


def _from_bits(bits: NDArray[np.uint32]) -> Floats:
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
