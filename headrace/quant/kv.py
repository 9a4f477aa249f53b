import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend_traits import KvDtype
from headrace.config import KeyRounding

BLOCK_SIZE = 32

CUTS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of both halves of a range that int4 tries: fewer numbers lie far out than its codes."""
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


def key_format(dtype: KvDtype) -> KvDtype:
    return "int8" if dtype == "k8v4" else dtype


def value_format(dtype: KvDtype) -> KvDtype:
    return "int4" if dtype == "k8v4" else dtype


def round_trip(x: Doubles, dtype: KvDtype, rounding: KeyRounding | None = None) -> Doubles:
    """The values [..., numbers of a vector] that attention reads back.

    Keys [..., KV heads, numbers] may have a `rounding`. It keeps them without their centre, which
    adds the same to all scores of a query.
    """
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
    if rounding and dtype == "int4":
        return round_with_feedback((x - rounding.centre) @ rotation, rounding.feedback) @ rotation
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
    return key_format(dtype) in _BITS


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
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    best = _codes(x, *_range(low, high, levels), levels)
    if bits > 4:
        return best

    least = np.full_like(low, np.inf)
    middle, half = (low + high) / 2, (high - low) / 2
    for i, below in enumerate(CUTS):
        for above in CUTS[max(0, i - 2) : i + 3]:
            ends = _range(middle - below * half, middle + above * half, levels)
            rounded = _codes(x, *ends, levels)
            error = ((rounded - x) ** 2).sum(axis=-1, keepdims=True)
            best = np.where(error < least, rounded, best)
            least = np.minimum(error, least)
    return best


def _range(low: Doubles, high: Doubles, levels: int) -> tuple[Doubles, Doubles]:
    """The lowest number of the codes, and their step."""
    minimum = -bf16_above(-low)
    step = bf16_above((high - minimum) / levels)
    return minimum, np.where(step > 0, step, 1)


def _codes(x: Doubles, minimum: Doubles, step: Doubles, levels: int) -> Doubles:
    codes = np.clip(np.rint((x - minimum) / step), 0, levels)
    rounded: Doubles = codes * step + minimum
    return rounded


def round_with_feedback(x: Doubles, feedback: NDArray[np.float32]) -> Doubles:
    """int4 of keys [..., KV heads, numbers], each number after the errors of those before.

    `feedback` is that of `KeyRounding`.
    """
    levels = 15
    minimum, step = _range(x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True), levels)
    rest, rounded = x.copy(), np.empty_like(x)
    for i in range(x.shape[-1]):
        number = _codes(rest[..., i : i + 1], minimum, step, levels)
        rounded[..., i : i + 1] = number
        rest -= (number - x[..., i : i + 1]) * feedback[:, i]
    return rounded


def bf16_above(x: Doubles) -> Doubles:
    """bf16, rounded up."""
    bits = x.astype(np.float32).view(np.uint32)
    return _from_bits(np.where(x > 0, bits + np.uint32(0xFFFF), bits))


def _from_bits(bits: NDArray[np.uint32]) -> Doubles:
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
