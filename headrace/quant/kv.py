import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend_traits import KvDtype

BLOCK_SIZE = 32

_BITS = {"int8": 8, "int4": 4}

Doubles = NDArray[np.float64]


def block_bytes(dtype: KvDtype, key_dim: int, value_dim: int) -> int:
    """Bytes of a block of a layer and KV head (`KvRecord` in csrc/kernels.h).

    A `value_dim` of 0 means that values are a part of the keys. fp8 adds a float32 per vector.
    """
    if dtype == "fp8":
        return BLOCK_SIZE * sum(dim + 4 for dim in (key_dim, value_dim) if dim)
    return _native.kv_block_bytes(dtype, key_dim, value_dim)


def bound_bytes(key_dim: int) -> int:
    """Bytes of the minimum and maximum of each number of a block's keys, in a layer and KV head.

    They are bf16, in whole lines of 16 numbers.
    """
    return 2 * 2 * (-(-key_dim // 16) * 16)


def round_trip(x: Doubles, dtype: KvDtype) -> Doubles:
    """The values [..., numbers of a vector] that attention reads back."""
    if dtype == "f32":
        return x
    if dtype == "bf16":
        return round_bf16(x)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float16).astype(np.float64)
    if dtype == "fp8":
        return _scaled_e4m3(x)
    rotation = hadamard(x.shape[-1])
    return _quantised(x @ rotation, _BITS[dtype]) @ rotation


def round_bf16(x: Doubles) -> Doubles:
    bits = x.astype(np.float32).view(np.uint32)
    return _from_bits(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


def _scaled_e4m3(x: Doubles) -> Doubles:
    numbers = x.astype(np.float32)
    scale = np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(448)
    scaled = (numbers / np.where(scale > 0, scale, np.float32(1))).astype(np.float64)
    # The distance of neighbours; the minimum normal exponent is -6.
    step = np.ldexp(1.0, np.maximum(np.frexp(scaled)[1] - 1, -6) - 3)
    rounded: Doubles = np.rint(scaled / step) * step * scale
    return rounded


def is_rotated(dtype: KvDtype) -> bool:
    """Whether keys are stored after a rotation, as queries are multiplied."""
    return dtype in _BITS


def hadamard(n: int) -> Doubles:
    """Walsh-Hadamard matrices along the diagonal [n, n].

    They spread outliers over a key (QuaRot, Ashkboos et al. 2024).
    """
    size = n & -n
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(n // size), block / np.sqrt(size))


def _quantised(x: Doubles, bits: int) -> Doubles:
    levels = 2**bits - 1
    minimum = -bf16_above(-x.min(axis=-1, keepdims=True))
    step = bf16_above((x.max(axis=-1, keepdims=True) - minimum) / levels)
    codes = np.rint((x - minimum) / np.where(step > 0, step, 1))
    return codes * step + minimum


def bf16_above(x: Doubles) -> Doubles:
    """bf16, rounded up."""
    bits = x.astype(np.float32).view(np.uint32)
    return _from_bits(np.where(x > 0, bits + np.uint32(0xFFFF), bits))


def _from_bits(bits: NDArray[np.uint32]) -> Doubles:
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
