"""Merges the partial results of attention over splits of the context, in ascending order."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.attention_work import ROW_FIELDS
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.hadamard import hadamard, heads_per_program
from headrace.backend.cuda.launch import Launch, blocks, power_of_2

_ROW_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit
def _power_of_2(exponent):
    """2 to integers up to 0, exactly; 0 below the exponents of normal numbers."""
    least = tl.maximum(exponent, -127.0)
    return ((least.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def factors(most, other):
    """Maximum score of two partial results, and the factor of each; 0 for a result without keys.

    Maxima are integers, so the factors are powers of two, and scaling with them is exact. So sums
    may be scaled to a running maximum or to the last one: the bits are the same.
    """
    new_most = tl.maximum(most, other)
    reference = tl.where(new_most == float("-inf"), 0.0, new_most)
    return new_most, _power_of_2(most - reference), _power_of_2(other - reference)


@triton.jit
def finished(total, weight, most, sink, HAS_SINKS: tl.constexpr):
    """Divide sums by the sum of weights, to which a head's sink belongs; zeros without keys."""
    if HAS_SINKS:
        sink = sink * 1.4426950408889634
        new_most = tl.maximum(most, sink)
        before = tl.exp2(most - new_most)
        total = total * before[:, None]
        weight = weight * before + tl.exp2(sink - new_most)
    return total / tl.where(most > float("-inf"), weight, 1.0)[:, None]


@triton.jit
def _partial(first, i, head, NUM_HEADS: tl.constexpr):
    """Number of a partial result of a head."""
    return (first + i).to(tl.int64) * NUM_HEADS + head


@triton.jit
def attention_merge_kernel(
    out, out_stride, records, rows, sums, weights, sinks,
        NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, SUMMED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG: tl.constexpr, LEAST: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr, MAXIMA: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge some of the heads of all rows, except rows with 1 to `LEAST` - 1 partial results."""
    unit = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row, head, column = (
        (unit // NUM_HEADS).to(tl.int64),
        unit % NUM_HEADS,
        tl.arange(0, COLS)[None, :],
    )
    first = tl.load(records + row * _ROW_FIELDS, row < rows, 0)
    count = tl.load(records + row * _ROW_FIELDS + 1, row < rows, 0)
    is_merged = (row < rows) & ((count == 0) | (count >= LEAST))
    count = tl.where(is_merged, count, 0)
    top = tl.max(count)
    several = tl.arange(0, MAXIMA)[None, :]
    tops = tl.full((HEADS, MAXIMA), float("-inf"), tl.float32)
    for i in range(0, top, MAXIMA):
        place = weights + 2 * _partial(first, i, head, NUM_HEADS)[:, None]
        part = tl.load(place + 2 * NUM_HEADS * several, i + several < count[:, None], float("-inf"))
        tops = tl.maximum(tops, part)
    most = tl.max(tops, axis=1)
    tl.debug_barrier()
    # Factors take the places of the maxima, from where each thread reads all of them.
    for i in range(0, top, MAXIMA):
        place = weights + 2 * _partial(first, i, head, NUM_HEADS)[:, None] + 2 * NUM_HEADS * several
        part = tl.load(place, i + several < count[:, None], float("-inf"))
        _, factor, _ = factors(part, most[:, None])
        tl.store(place, factor, i + several < count[:, None])
    tl.debug_barrier()

    total = tl.zeros((HEADS, COLS), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    for i in range(0, top, AHEAD):
        at = _partial(first, i, head, NUM_HEADS)
        place, factor_place = sums + at[:, None] * SUMMED_DIM + column, weights + 2 * at
        loaded = ()  # before all sums: the compiler keeps the order
        for j in tl.static_range(AHEAD):
            valid = i + j < count
            is_read = valid[:, None] & (column < SUMMED_DIM)
            acc = tl.load(place + j * NUM_HEADS * SUMMED_DIM, is_read, 0.0)
            factor = tl.load(factor_place + 2 * NUM_HEADS * j, valid, 0.0)
            part = tl.load(factor_place + 2 * NUM_HEADS * j + 1, valid, 0.0)
            loaded += ((acc, factor, part),)  # type: ignore[assignment]
        for j in tl.static_range(AHEAD):
            acc, factor, part = loaded[j]
            # Factors are powers of two, so that fusing a product with the sum rounds nothing else.
            total = tl.fma(acc, tl.broadcast_to(factor[:, None], (HEADS, COLS)), total)
            weight = tl.fma(part, factor, weight)
    sink = weight
    if HAS_SINKS:
        sink = tl.load(sinks + head)
    result = finished(total, weight, most, sink, HAS_SINKS)
    if LOG:
        result = hadamard(result, HEADS, COLS, LOG)
    place = out + (row * out_stride + head * VALUE_DIM)[:, None] + column
    tl.store(place, result.to(out.dtype.element_ty), is_merged[:, None] & (column < VALUE_DIM))


def merge(
    out: Any,
    records: Any,
    sums: Any,
    weights: Any,
    sinks: Any,
    num_heads: int,
    value_dim: int,
    summed_dim: int,
    log_size: int,
    least: int,
) -> Launch:
    """Merge partial results (`Scratch`), `summed_dim` numbers per head, into `out` [rows, heads *
    value_dim].

    `log_size` is the logarithm of the size of the Hadamard matrices that rotated the values; 0:
    none. Rows with fewer partial results than `least` are in `out` already.
    """
    rows = out.shape[0]
    heads, cols = heads_per_program(rows * num_heads, summed_dim)
    if not is_interpreting():  # enough programs to fill the GPU
        heads = min(heads, power_of_2(max(1, rows * num_heads // 4096)))
    constants = {
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "SUMMED_DIM": summed_dim,
        "HAS_SINKS": sinks is not None,
        "LOG": log_size,
        "LEAST": least,
        "HEADS": heads,
        "COLS": cols,
        "MAXIMA": 256 if heads == 1 else 64,
        # Few rows may have long contexts, with many partial results.
        "AHEAD": 8 if rows * num_heads > 512 or is_interpreting() else 32,
        "num_warps": 4,
    }
    args = (out, out.stride(0), records, rows, sums, weights, sums if sinks is None else sinks)
    return Launch(attention_merge_kernel, (blocks(rows * num_heads, heads),), args, constants)
