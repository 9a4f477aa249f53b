"""Ops that move numbers: chosen rows and columns, and heads of two values next to each other."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    index,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    source = tl.load(index + row, mask, 0).to(tl.int64)
    tl.store(
        out + row * out_stride + column,
        tl.load(x + source * x_stride + column, mask).to(out.dtype.element_ty),
        mask,
    )


def gather_rows(out: Any, x: Any, index: Any) -> Launch:
    """Compute out[r] = x[index[r]], with int32 `index`; padding rows may name any row of x."""
    return flat(gather_rows_kernel, out, x, x.stride(0), index)


@triton.jit(do_not_specialize=["rows"])
def scatter_rows_kernel(
    x,
    rows,
    x_stride,
    out,
    out_stride,
    index,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    target = tl.load(index + row, mask, 0).to(tl.int64)
    numbers = tl.load(x + row * x_stride + column, mask)
    tl.store(out + target * out_stride + column, numbers.to(out.dtype.element_ty), mask)


def scatter_rows(out: Any, x: Any, index: Any) -> Launch:
    """Compute out[index[r]] = x[r], with int32 `index`; padding rows may share a row of out."""
    return flat(scatter_rows_kernel, x, out, out.stride(0), index)


@triton.jit(do_not_specialize=["rows"])
def spread_columns_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    index,
    other,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    source = tl.load(index + column, mask, -1)
    is_there = mask & (source >= 0)
    numbers = tl.load(x + row * x_stride + tl.maximum(source, 0), is_there, 0.0)
    tl.store(out + row * out_stride + column, tl.where(source >= 0, numbers, other), mask)


def spread_columns(out: Any, x: Any, index: Any, other: float) -> Launch:
    """Compute out[r, c] = x[r, index[c]], with int32 `index`; `other` if it is -1."""
    return flat(spread_columns_kernel, out, x, x.stride(0), index, other)


@triton.jit(do_not_specialize=["rows"])
def concat_heads_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    y,
    y_stride,
    X_DIM: tl.constexpr,
    Y_DIM: tl.constexpr,
    X_SHARED: tl.constexpr,
    Y_SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    head, at = column // (X_DIM + Y_DIM), column % (X_DIM + Y_DIM)
    x_head = 0 if X_SHARED else head * X_DIM
    y_head = 0 if Y_SHARED else head * Y_DIM
    of_x = tl.load(x + row * x_stride + x_head + at, mask & (at < X_DIM), 0.0).to(tl.float32)
    of_y = tl.load(y + row * y_stride + y_head + at - X_DIM, mask & (at >= X_DIM), 0.0).to(
        tl.float32
    )
    tl.store(
        out + row * out_stride + column,
        tl.where(at < X_DIM, of_x, of_y).to(out.dtype.element_ty),
        mask,
    )


def concat_heads(out: Any, x: Any, y: Any, num_heads: int, x_dim: int, y_dim: int) -> Launch:
    """Write to out[t, head] the `x_dim` numbers of x[t, head], then the `y_dim` numbers of y[t,
    head].

    Either input may have one head that all share.
    """
    shared = {"X_SHARED": x.shape[1] == x_dim, "Y_SHARED": y.shape[1] == y_dim}
    return flat(
        concat_heads_kernel, out, x, x.stride(0), y, y.stride(0), X_DIM=x_dim, Y_DIM=y_dim, **shared
    )
