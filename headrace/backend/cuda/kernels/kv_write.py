"""Writes keys and values to their slots in the store's format; fused ops rotate on the way."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.hadamard import hadamard, heads_per_program, log_size
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch, blocks

_INFINITY = tl.constexpr(float("inf"))
_LARGEST_E4M3 = tl.constexpr(448.0)
_ROUNDING = tl.constexpr(
    12582912.0
)  # added and taken off again, it rounds to the nearest integer, ties to even


@triton.jit
def _load(x, row, stride, head, mask, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load heads [heads, COLS] of rows; zeros outside."""
    column = tl.arange(0, COLS)[None, :]
    return tl.load(
        x + (row * stride + head * DIM)[:, None] + column, mask[:, None] & (column < DIM), 0.0
    )


@triton.jit
def _rotated(
    x, angles, row, stride, mask, PAIRS: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr
):
    """Rotate the first pairs (2i, 2i + 1) of `x` [HEADS, COLS] by the angles of their rows."""
    pair = tl.arange(0, COLS // 2)[None, :]
    is_rotated = mask[:, None] & (pair < PAIRS)
    angle = angles + (row * stride)[:, None] + pair
    cos, sin = tl.load(angle, is_rotated, 1.0), tl.load(angle + PAIRS, is_rotated, 0.0)
    even, odd = tl.split(tl.reshape(x, (HEADS, COLS // 2, 2)))
    first = tl.where(is_rotated, even * cos - odd * sin, even)
    second = tl.where(is_rotated, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(first, second), (HEADS, COLS))


@triton.jit
def _bf16_above(x):
    """Smallest bfloat16 that is at least x, as a float32."""
    bits = x.to(tl.uint32, bitcast=True)
    return (tl.where(x > 0, bits + 0xFFFF, bits) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _is_bad(x, LARGEST: tl.constexpr):
    """Rows of `x` with numbers that the store cannot represent: NaN, infinite or overflowing."""
    return tl.max(tl.where(tl.abs(x) <= LARGEST, 0, 1), axis=1) > 0


@triton.jit
def _store(
    cache,
    scales,
    at,
    mask,
    x,
    is_bad,
    IS_KEY: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write `x` [heads, COLS] to `at` [heads]; bad numbers become zeros, and a bad key is marked
    by NaN.
    """
    x = tl.where(is_bad[:, None], 0.0, x)
    column = tl.arange(0, COLS)[None, :]
    there = column < DIM
    if FORMAT == "fp8":
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), _LARGEST_E4M3)
        codes = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        tl.store(scales + at, tl.where(is_bad & IS_KEY, float("nan"), scale), mask)
    elif FORMAT == "int8":
        least = -_bf16_above(-tl.min(tl.where(there, x, _INFINITY), axis=1))
        step = _bf16_above(tl.div_rn(tl.max(tl.where(there, x, -_INFINITY), axis=1) - least, 255.0))
        codes = (
            tl.div_rn(x - least[:, None], tl.where(step > 0, step, 1.0)[:, None])
            + _ROUNDING
            - _ROUNDING
        )
        tl.store(
            scales + 2 * at, tl.where(is_bad & IS_KEY, float("nan"), least).to(tl.bfloat16), mask
        )
        tl.store(scales + 2 * at + 1, step.to(tl.bfloat16), mask)
    else:
        codes = tl.where(is_bad[:, None] & (column == DIM - 1) & IS_KEY, float("nan"), x)
    tl.store(
        cache + at[:, None] * DIM + column, codes.to(cache.dtype.element_ty), mask[:, None] & there
    )


@triton.jit
def kv_write_kernel(
        q_out, q_out_stride, q, k, v, x_stride, v_stride, angles, angles_stride, slots, rows, keys,
    key_scales, values, value_scales,
        NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_LOG: tl.constexpr,
        VALUE_LOG: tl.constexpr, PAIRS: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEY_COLS: tl.constexpr, VALUE_COLS: tl.constexpr,
):  # fmt: skip
    """Write some KV heads of all rows, which come first in the grid, or rotate some query heads."""
    num_kv_parts = tl.cdiv(rows * KV_HEADS, HEADS)
    if tl.program_id(0) >= num_kv_parts:
        unit = (tl.program_id(0) - num_kv_parts) * HEADS + tl.arange(0, HEADS)
        row, head = (unit // NUM_HEADS).to(tl.int64), unit % NUM_HEADS
        mask = row < rows
        x = _load(q, row, x_stride, head, mask, KEY_DIM, KEY_COLS)
        x = _rotated(x, angles, row, angles_stride, mask, PAIRS, HEADS, KEY_COLS)
        column = tl.arange(0, KEY_COLS)[None, :]
        tl.store(
            q_out + (row * q_out_stride + head * KEY_DIM)[:, None] + column,
            x,
            mask[:, None] & (column < KEY_DIM),
        )
    else:
        unit = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        row, head = (unit // KV_HEADS).to(tl.int64), unit % KV_HEADS
        mask = row < rows
        slot = tl.load(slots + row, mask, 0).to(tl.int64)
        at = (slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK
        x = _load(k, row, x_stride, head, mask, KEY_DIM, KEY_COLS)
        if PAIRS:
            x = _rotated(x, angles, row, angles_stride, mask, PAIRS, HEADS, KEY_COLS)
        if FORMAT == "int8":
            x = hadamard(x, HEADS, KEY_COLS, KEY_LOG)
        is_bad = _is_bad(x, LARGEST)
        if VALUE_DIM:
            y = _load(v, row, v_stride, head, mask, VALUE_DIM, VALUE_COLS)
            if FORMAT == "int8":
                y = hadamard(y, HEADS, VALUE_COLS, VALUE_LOG)
            is_bad = is_bad | _is_bad(y, LARGEST)
            _store(values, value_scales, at, mask, y, is_bad, False, FORMAT, VALUE_DIM, VALUE_COLS)
        _store(keys, key_scales, at, mask, x, is_bad, True, FORMAT, KEY_DIM, KEY_COLS)


_LARGEST = {
    "f32": 3.4028234663852886e38,
    "bf16": 3.3895313892515355e38,
    "f16": 65504.0,
    "fp8": 3.4028234663852886e38,
    "int8": 1e38,
}
"""Of numbers that a store can keep; the range of a vector must be finite for int8."""


def _write(
    q_out: Any, q: Any, k: Any, v: Any, angles: Any, slots: Any, store: KvStore, layer: int
) -> Launch:
    layout, rows = store.group.layout, k.shape[0]
    num_heads = 0 if q_out is None else q.shape[1] // layout.key_dim
    heads, key_cols, *value_cols = heads_per_program(
        rows * max(num_heads, layout.num_heads),
        *(d for d in (layout.key_dim, layout.value_dim) if d),
    )
    constants = {
        "NUM_HEADS": max(1, num_heads),
        "KV_HEADS": layout.num_heads,
        "KEY_DIM": layout.key_dim,
        "VALUE_DIM": layout.value_dim,
        "KEY_LOG": log_size(layout.key_dim),
        "VALUE_LOG": log_size(layout.value_dim) if layout.value_dim else 0,
        "PAIRS": 0 if angles is None else angles.shape[1] // 2,
        "FORMAT": store.format,
        "LARGEST": _LARGEST[store.format],
        "BLOCK": store.block_size,
        "HEADS": heads,
        "KEY_COLS": key_cols,
        "VALUE_COLS": value_cols[0] if value_cols else 2,
        "num_warps": 4,
    }
    given = [
        k if x is None else x for x in (q_out, q, k, v, angles)
    ]  # those that are not there are never looked at
    q_out, q, k, v, angles = given
    args = (
        q_out,
        q_out.stride(0),
        q,
        k,
        v,
        k.stride(0),
        v.stride(0),
        angles,
        angles.stride(0),
        slots,
        rows,
        *store.layer(layer),
    )
    programs = blocks(rows * layout.num_heads, heads) + blocks(rows * num_heads, heads)
    return Launch(kv_write_kernel, (programs,), args, constants)


def rope_write(q_out: Any, x: Any, angles: Any, slots: Any, store: KvStore, layer: int) -> Launch:
    """Rotate queries and keys of `x` (q | k | v per row) and write keys and values to a layer's
    slots.

    `x` [rows, heads * key_dim + kv_heads * (key_dim + value_dim)], `angles` [rows, 2 * pairs]
    (cosines, then sines) and `q_out` [rows, heads * key_dim] are float32, `slots` [rows] int32.
    """
    layout = store.group.layout
    q_width, k_width = q_out.shape[1], layout.num_heads * layout.key_dim
    q, k, v = x[:, :q_width], x[:, q_width : q_width + k_width], x[:, q_width + k_width :]
    return _write(q_out, q, k, v, angles, slots, store, layer)


def kv_write(k: Any, v: Any, slots: Any, store: KvStore, layer: int) -> Launch:
    """Write keys [rows, kv_heads * key_dim] and values to a layer's `slots`; `v` is None if keys
    hold them.
    """
    return _write(None, None, k, v, None, slots, store, layer)
