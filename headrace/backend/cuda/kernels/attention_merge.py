"""Merges the partial results of attention over splits of the context, in ascending order."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.attention_work import ROW_FIELDS
from headrace.backend.cuda.kernels.hadamard import hadamard, heads_per_program
from headrace.backend.cuda.launch import Launch, blocks

_ROW_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit
def factors(most, other):
    """Maximum score of two partial results, and the factor of each; 0 for a result without keys."""
    new_most = tl.maximum(most, other)
    reference = tl.where(new_most == float("-inf"), 0.0, new_most)
    return new_most, tl.exp2(most - reference), tl.exp2(other - reference)


@triton.jit
def attention_merge_kernel(
    out, out_stride, records, rows, sums, weights, sinks,
        NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, SUMMED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG: tl.constexpr,
    HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Merge some of the heads of all rows."""
    unit = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row, head, column = (
        (unit // NUM_HEADS).to(tl.int64),
        unit % NUM_HEADS,
        tl.arange(0, COLS)[None, :],
    )
    first = tl.load(records + row * _ROW_FIELDS, row < rows, 0)
    count = tl.load(records + row * _ROW_FIELDS + 1, row < rows, 0)
    total = tl.zeros((HEADS, COLS), tl.float32)
    total_weight = tl.zeros((HEADS,), tl.float32)
    total_most = tl.full((HEADS,), float("-inf"), tl.float32)
    for i in range(0, tl.max(count)):
        valid = i < count
        at = (first + i).to(tl.int64) * NUM_HEADS + head
        acc = tl.load(
            sums + at[:, None] * SUMMED_DIM + column, valid[:, None] & (column < SUMMED_DIM), 0.0
        )
        most = tl.load(weights + 2 * at, valid, float("-inf"))
        weight = tl.load(weights + 2 * at + 1, valid, 0.0)
        new_most, before, now = factors(total_most, most)
        total = total * before[:, None] + acc * now[:, None]
        total_weight = total_weight * before + weight * now
        total_most = new_most
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        _, before, now = factors(total_most, sink)
        total = total * before[:, None]
        total_weight = total_weight * before + now
    result = total / tl.where(count > 0, total_weight, 1.0)[:, None]  # zeros without keys
    if LOG:
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

    `log_size` is the logarithm of the size of the Hadamard matrices that rotated the values; 0:
    none.
    """
    rows = out.shape[0]
    heads, cols = heads_per_program(rows * num_heads, summed_dim)
    constants = {
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "SUMMED_DIM": summed_dim,
        "HAS_SINKS": sinks is not None,
        "LOG": log_size,
        "HEADS": heads,
        "COLS": cols,
        "num_warps": 4,
    }
    args = (out, out.stride(0), records, rows, sums, weights, sums if sinks is None else sinks)
    return Launch(attention_merge_kernel, (blocks(rows * num_heads, heads),), args, constants)
