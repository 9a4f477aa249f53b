"""Merges the partial results of attention over splits of the context, in ascending order: in the
program that ends last, or in a launch of its own if the results have to be rotated back.
"""

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
def merge_where_last(
    items, count, records, arrivals, sums, weights, sinks, out, out_stride,
        FEWEST: tl.constexpr, MOST: tl.constexpr, NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr, TILE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
        HAS_SINKS: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge the rows of this program's units of which it has stored the last partial result.

    `arrivals` [rows, heads] counts the partial results that are there, and is zero between
    launches.
    """
    tl.debug_barrier()
    UNITS: tl.constexpr = KV_HEADS * HEAD_TILES
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    for unit in range(tl.program_id(0), tl.load(count) * UNITS, tl.num_programs(0)):
        item, m = items + unit // UNITS * FIELDS, tl.arange(0, ROWS)
        first_row, num_rows = tl.load(item), tl.load(item + 1)
        if (num_rows >= FEWEST) & (num_rows <= MOST):
            kv_head, in_group = unit % UNITS // HEAD_TILES, unit % HEAD_TILES * TILE_HEADS
            valid = (m // TILE_HEADS < num_rows) & (in_group + m % TILE_HEADS < GROUP)
            row = (first_row + m // TILE_HEADS).to(tl.int64)
            partials = tl.load(records + row * _ROW_FIELDS + 1, valid, 0)
            is_partial = partials > 1
            counter = arrivals + row * NUM_HEADS + kv_head * GROUP + in_group + m % TILE_HEADS
            arrived = tl.atomic_add(counter, 1, is_partial, sem="acq_rel")
            is_last = is_partial & (arrived == partials - 1)
            for r in range(num_rows):
                if tl.max(tl.where(is_last & (m // TILE_HEADS == r), 1, 0)) > 0:
                    _merge_row(
                        (first_row + r).to(tl.int64), kv_head * GROUP, in_group, records,
                        sums, weights, sinks, out, out_stride,
                        NUM_HEADS, TILE_HEADS, GROUP, VALUE_DIM, HAS_SINKS, HEADS, COLS, AHEAD,
                    )  # fmt: skip
            tl.store(counter, 0, is_last)


@triton.jit
def _merge_row(
    row, first_of_group, in_group, records, sums, weights, sinks, out, out_stride,
        NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge a row for some heads of a group, with factors to the maximum so far."""
    each, column = tl.arange(0, HEADS), tl.arange(0, COLS)[None, :]
    head = first_of_group + in_group + each
    is_head = (each < TILE_HEADS) & (in_group + each < GROUP)
    first, count = tl.load(records + row * _ROW_FIELDS), tl.load(records + row * _ROW_FIELDS + 1)
    total = tl.zeros((HEADS, COLS), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    for i in range(0, count, AHEAD):
        at = _partial(first, i, head, NUM_HEADS)
        loaded = ()  # before all sums: the compiler keeps the order
        for j in tl.static_range(AHEAD):
            there = is_head & (i + j < count)
            place, number = sums + at[:, None] * VALUE_DIM + column, weights + 2 * at
            acc = tl.load(
                place + j * NUM_HEADS * VALUE_DIM,
                there[:, None] & (column < VALUE_DIM),
                0.0,
                cache_modifier=".cg",
            )
            top = tl.load(number + 2 * NUM_HEADS * j, there, float("-inf"), cache_modifier=".cg")
            part = tl.load(number + 2 * NUM_HEADS * j + 1, there, 0.0, cache_modifier=".cg")
            loaded += ((acc, top, part),)  # type: ignore[assignment]
        for j in tl.static_range(AHEAD):
            acc, top, part = loaded[j]
            most, before, now = factors(most, top)
            # Factors are powers of two, so that fusing a product with the sum rounds nothing else.
            total = tl.fma(total, tl.broadcast_to(before[:, None], total.shape), acc * now[:, None])
            weight = tl.fma(weight, before, part * now)
    sink = weight
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_head, 0.0)
    result = finished(total, weight, most, sink, HAS_SINKS)
    place = out + (row * out_stride + head * VALUE_DIM)[:, None] + column
    tl.store(place, result.to(out.dtype.element_ty), is_head[:, None] & (column < VALUE_DIM))


@triton.jit
def clear_rows_without_work(
    records, rows, out, out_stride, WIDTH: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Write zeros to every n-th row, if it has no partial results: padding."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(records + row * _ROW_FIELDS + 1) == 0:
            for first in range(0, WIDTH, COLS):
                column = first + tl.arange(0, COLS)
                place = out + (tl.full((), 0, tl.int64) + row) * out_stride + column
                tl.store(place, tl.zeros((COLS,), out.dtype.element_ty), column < WIDTH)


@triton.jit
def attention_merge_kernel(
    out, out_stride, records, rows, sums, weights, sinks,
        NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, SUMMED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr, MAXIMA: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge some of the heads of all rows, and rotate their results back."""
    unit = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row, head, column = (
        (unit // NUM_HEADS).to(tl.int64),
        unit % NUM_HEADS,
        tl.arange(0, COLS)[None, :],
    )
    first = tl.load(records + row * _ROW_FIELDS, row < rows, 0)
    count = tl.load(records + row * _ROW_FIELDS + 1, row < rows, 0)
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
    result = hadamard(result, HEADS, COLS, LOG)
    place = out + (row * out_stride + head * VALUE_DIM)[:, None] + column
    tl.store(place, result.to(out.dtype.element_ty), (row < rows)[:, None] & (column < VALUE_DIM))


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
) -> Launch:
    """Merge partial results (`Scratch`), `summed_dim` numbers per head, into `out` [rows, heads *
    value_dim].

    `log_size` is the logarithm of the size of the Hadamard matrices that rotated the values.
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
        "HEADS": heads,
        "COLS": cols,
        "MAXIMA": 256 if heads == 1 else 64,
        # Few rows may have long contexts, with many partial results.
        "AHEAD": 8 if rows * num_heads > 512 or is_interpreting() else 32,
        "num_warps": 4,
    }
    args = (out, out.stride(0), records, rows, sums, weights, sums if sinks is None else sinks)
    return Launch(attention_merge_kernel, (blocks(rows * num_heads, heads),), args, constants)
