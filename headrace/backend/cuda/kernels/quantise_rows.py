"""Activations to int8 with a scale per row, for int8 weights by row."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, power_of_2

OUTLIER: tl.constexpr = tl.constexpr(6.0)
"""Magnitude from which on, where outliers are kept apart, a number is one (LLM.int8, Dettmers et
al. 2022).
"""


@triton.jit
def is_outlier(x):
    """Whether a number is multiplied as a float."""
    return tl.abs(x) > OUTLIER


@triton.jit
def quantise_rows_kernel(
    codes,
    scales,
    x,
    codes_stride,
    x_stride,
    width,
    columns,
    MIXED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantise one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    v = tl.load(x + row * x_stride + column, column < width, 0.0).to(tl.float32)
    # Numbers that are not finite have no code: their row has zeros, and a scale that spoils what is
    # computed from it.
    is_finite = tl.sum(v * 0.0, 0) == 0.0
    if MIXED:
        v = tl.where(is_outlier(v), 0.0, v)
    v = tl.where(is_finite, v, 0.0)
    top = tl.max(tl.abs(v), 0)
    inverse = tl.where(
        top > 1e-36, tl.div_rn(127.0, tl.maximum(top, 1e-36)), 0.0
    )  # that of less would overflow
    scaled = v * inverse
    nearest = (
        scaled + 12582912.0
    ) - 12582912.0  # 1.5 * 2^23: of such sums whole numbers alone are left, ties to even
    tl.store(codes + row * codes_stride + column, nearest.to(tl.int8), column < columns)
    tl.store(scales + row, tl.where(is_finite, tl.div_rn(top, 127.0), float("nan")))


def quantise_rows(codes: Any, scales: Any, x: Any, outliers: bool) -> Launch:
    """Compute codes[t] = x[t] / scales[t], rounded to nearest even, with scales[t] = max |x[t]| /
    127.

    `x` is float32 or bf16 [rows, width]; `codes` int8 [rows, at least width], zeros after the
    width; `scales` float32 [rows]. With `outliers`, numbers with `is_outlier` get the code 0 and
    do not count for the scale. A row with a number that is not finite gets the codes 0 and the
    scale NaN.
    """
    rows, width = x.shape
    columns = codes.shape[1]
    block = power_of_2(columns, 16)
    constants = {"MIXED": outliers, "COLUMNS": block, "num_warps": min(16, max(1, block // 256))}
    return Launch(
        quantise_rows_kernel,
        (rows,),
        (codes, scales, x, codes.stride(0), x.stride(0), width, columns),
        constants,
    )
