"""Kernels around exchanges between ranks: they put received numbers in their places."""

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch


@triton.jit(do_not_specialize=["rows"])
def place_columns_kernel(
    out,
    rows,
    out_stride,
    x,
    offsets,
    strides,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    at = tl.load(offsets + column, mask, 0) + row * tl.load(strides + column, mask, 0)
    tl.store(
        out + row * out_stride + column,
        tl.load(x + at, mask).to(out.dtype.element_ty),
        mask,
    )


def place_columns(out: Any, x: Any, offsets: Any, strides: Any) -> Launch:
    """Compute out[t, c] = x[offsets[c] + t * strides[c]], numbers in memory after `x`.

    `offsets` and `strides` are int64 [columns of out].
    """
    return flat(place_columns_kernel, out, x, offsets, strides)


@triton.jit(do_not_specialize=["rows"])
def choose_owned_kernel(
    out,
    rows,
    out_stride,
    x,
    numbers,
    numbers_stride,
    ends,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    number = tl.load(numbers + row * numbers_stride + column // COLUMNS, mask, 0).to(tl.int32)
    owner = tl.zeros([BLOCK], tl.int64)
    for rank in tl.static_range(RANKS - 1):
        owner += (number >= tl.load(ends + rank)).to(tl.int64)
    tl.store(
        out + row * out_stride + column,
        tl.load(x + (owner * rows + row) * WIDTH + column, mask).to(out.dtype.element_ty),
        mask,
    )


def choose_owned(out: Any, x: Any, numbers: Any, ends: Any) -> Launch:
    """Compute out[t] = x[rank, t] with the numbers of the rank that owns them.

    `x` is [ranks * rows, width], rank by rank. `numbers` is [rows, choices]: tokens or experts,
    each of which names the owner of as many columns as the others. Rank r owns the numbers from
    `ends[r - 1]` to `ends[r] - 1`; `ends` is int32 [ranks].
    """
    columns = out.shape[1] // numbers.shape[1]
    return flat(
        choose_owned_kernel,
        out,
        x,
        numbers,
        numbers.stride(0),
        ends,
        RANKS=len(ends),
        COLUMNS=columns,
    )


@triton.jit(do_not_specialize=["rows"])
def read_tokens_kernel(
    out,
    rows,
    out_stride,
    tokens,
    source,
    last,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    drawn_by = tl.load(source + row, mask, -1)
    drawn = tl.load(last + tl.maximum(drawn_by, 0), mask, 0)
    token = tl.where(drawn_by >= 0, drawn, tl.load(tokens + row, mask, 0))
    tl.store(out + row * out_stride + column, token, mask)


def read_tokens(
    out: torch.Tensor, tokens: torch.Tensor, source: torch.Tensor, last: torch.Tensor
) -> Launch:
    """Compute out[t] = tokens[t], or last[source[t]] if `source` is not -1; all int32."""
    return flat(read_tokens_kernel, out[:, None], tokens, source, last)
