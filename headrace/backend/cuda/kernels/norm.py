"""RMSNorm and LayerNorm over all columns of a row, or over groups of them."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.program.ops import NormKind

_TILE = 4096
"""Numbers of a program that takes several groups of a row."""


@triton.jit
def norm_kernel(
    out,  # [rows, width] float32 or bf16
    x,  # [rows, width] float32
    weight,  # [size] or [width] float32
    bias,  # the same; None: there is none
    out_stride,
    x_stride,
    groups,
    eps,
    SIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    # whether weight and bias have numbers for all columns of a row, and not for a group of them
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norm some groups of one row; all sums have one shape, so one order."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_inside = column < SIZE
    mask = is_inside & (group < groups)
    at = group * SIZE + column
    v = tl.load(x + row * x_stride + at, mask, 0.0)
    if CENTRED:
        mean = tl.sum(v, 1, keep_dims=True) / SIZE
        v = tl.where(is_inside, v - mean, 0.0)
    square = tl.sum(v * v, 1, keep_dims=True) / SIZE
    # Where the squares are too large for a sum, a factor of 0 would make a row of zeros of it.
    factor = tl.where(square < float("inf"), tl.div_rn(1.0, tl.sqrt_rn(square + eps)), float("nan"))
    of_weight = at if WHOLE else column
    y = v * factor * tl.load(weight + of_weight, mask, 0.0)
    if bias is not None:
        y += tl.load(bias + of_weight, mask, 0.0)
    tl.store(out + row * out_stride + at, y.to(out.dtype.element_ty), mask)


def norm(
    out: Any, x: Any, weight: Any, bias: Any | None, eps: float, kind: NormKind, size: int
) -> Launch:
    """Compute `out` = x / sqrt(mean(x^2) + eps) * weight + bias over `size` columns at a time.

    "layer" replaces x by x - mean(x). `x` is float32, `out` float32 or bf16 [rows, width];
    `weight` and `bias` have `size` or `width` float32 numbers.
    """
    rows, width = x.shape
    groups, columns = width // size, power_of_2(size, 16)
    together = min(power_of_2(groups), max(1, _TILE // columns))
    constants = {
        "SIZE": size,
        "CENTRED": kind == "layer",
        "WHOLE": len(weight) == width,
        "GROUPS": together,
        "COLUMNS": columns,
        "num_warps": min(16, max(1, together * columns // 256)),
    }
    args = (out, x, weight, bias, out.stride(0), x.stride(0), groups, eps)
    return Launch(norm_kernel, (rows, blocks(groups, together)), args, constants)
