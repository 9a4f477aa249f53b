"""Rotary embeddings of rows outside fused ops."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch


@triton.jit(do_not_specialize=["rows"])
def rope_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    angles,
    angles_stride,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    in_head = column % HEAD_DIM
    rotated = mask & (in_head < 2 * PAIRS)
    v = tl.load(x + row * x_stride + column, mask)
    other = tl.load(x + row * x_stride + (column ^ 1), rotated, 0.0)  # the other number of the pair
    angle = angles + row * angles_stride + in_head // 2
    cos, sin = tl.load(angle, rotated, 1.0), tl.load(angle + PAIRS, rotated, 0.0)
    rotated_v = v * cos + other * tl.where(in_head % 2 == 0, -sin, sin)
    tl.store(
        out + row * out_stride + column,
        tl.where(rotated, rotated_v, v).to(out.dtype.element_ty),
        mask,
    )


def rope(out: Any, x: Any, angles: Any, head_dim: int) -> Launch:
    """Rotate the first pairs (2i, 2i + 1) of every head of `x` [rows, heads * head_dim] by the
    row's angles.

    `x` and `angles` [rows, 2 * pairs] are float32; `out` must not overlap `x`.
    """
    args = (x, x.stride(0), angles, angles.stride(0))
    return flat(rope_kernel, out, *args, HEAD_DIM=head_dim, PAIRS=angles.shape[1] // 2)
