"""Embeddings of tokens, some known only to the GPU, and of positions."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.product import decode, plane_codes
from headrace.backend.cuda.kernels.weight_format import (
    halves,
    super_scale,
    times_super_scale,
    weight_args,
    weight_format,
)
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.backend.cuda.layout import SUPER_BLOCK
from headrace.backend.cuda.packing import PackedWeight


def embed(
    out: torch.Tensor,
    weight: PackedWeight,
    tokens: torch.Tensor,
    source: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    *,
    first: int = 0,
) -> Launch:
    """Compute out[t] = weight[token of t - first], float32 [rows, cols].

    The token is `tokens[t]`, or `last_tokens[source[t]]` if `source` is not -1. Tokens that the
    weight does not have get its first or last row.
    """
    return _embed(out, weight, tokens, source, last_tokens, first)


def embed_position(out: torch.Tensor, weight: PackedWeight, positions: torch.Tensor) -> Launch:
    """Compute out[t] = weight[position of t]; positions are clipped to the last row."""
    return _embed(out, weight, positions, None, None, 0)


def _embed(
    out: torch.Tensor,
    weight: PackedWeight,
    index: torch.Tensor,
    source: torch.Tensor | None,
    last: torch.Tensor | None,
    first: int,
) -> Launch:
    block = power_of_2(min(weight.cols, 1024))
    return Launch(
        embed_kernel,
        (len(out), blocks(weight.cols, block)),
        (
            *(out, index, *(index if tensor is None else tensor for tensor in (source, last))),
            *(*weight_args(weight)[:4], first),
            *(weight.rows, weight.cols, weight.layout.padded_cols(weight.cols), out.stride(0)),
        ),
        {
            "FORMAT": weight_format(weight, torch.float32),
            **{"HAS_SOURCE": source is not None, "BLOCK": block, "num_warps": 4},
        },
    )


_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)


@triton.jit
def _numbers(table, group, row, num_rows, NUMBER: tl.constexpr, GROUP: tl.constexpr):
    """Load the numbers of a row for some groups of columns."""
    if NUMBER == "f32":
        numbers = tl.load(table + group * num_rows + row)
    elif NUMBER == "steps" or NUMBER == "eighths":
        block = group * GROUP // _SUPER_BLOCK
        first = block * (_SUPER_BLOCK // (4 * GROUP) + 1)
        super_scales = super_scale(tl.load(table + first * num_rows + row))
        words = tl.load(table + (group // 4 + block + 1) * num_rows + row)
        numbers = times_super_scale(super_scales, words, group % 4, NUMBER)
    else:
        low, high = halves(tl.load(table + group // 2 * num_rows + row), NUMBER)
        numbers = tl.where(group % 2 == 0, low, high)
    return numbers


@triton.jit
def embed_kernel(
    out, index, source, last, codes, scales, zeros, lookup,
    first, num_rows, columns, padded, out_stride,
    FORMAT: tl.constexpr, HAS_SOURCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of one row."""
    row, columns_of = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(index + row)
    if HAS_SOURCE:
        drawn_by = tl.load(source + row)
        number = tl.where(drawn_by >= 0, tl.load(last + tl.maximum(drawn_by, 0)), number)
    number = tl.minimum(tl.maximum(number - first, 0), num_rows - 1).to(tl.int64)
    inside = columns_of < columns
    k = tl.where(inside, columns_of, 0)
    of: tl.constexpr = FORMAT if FORMAT.kept is None else FORMAT.kept
    part: tl.constexpr = of.tile // of.planes
    group = k // FORMAT.group if FORMAT.group else k * 0
    is_kept = inside
    if FORMAT.kept is not None:
        bits = tl.load(zeros + k // 32 * num_rows + number) >> (k // 4 % 8 * 4)
        before = bits & ((1 << k % 4) - 1)
        is_kept = (bits >> k % 4) & 1 != 0
        k = k // 4 * 2 + tl.where(is_kept & (before != 0), 1, 0)
        padded = padded // 2
    at = k // of.tile * part + k % part
    stored = tl.load(codes + number * (padded // of.planes) + at)
    if FORMAT.scale != "":
        stored = plane_codes(stored, k // part % FORMAT.planes, FORMAT.planes)
        lookup_kind: tl.constexpr = FORMAT.lookup
        scale_kind: tl.constexpr = FORMAT.scale
        zero_kind: tl.constexpr = FORMAT.zero_store
        values = decode(stored, lookup, FORMAT.offset, lookup_kind)
        scale = _numbers(scales, group, number, num_rows, scale_kind, FORMAT.group)
        if FORMAT.zero != "none":
            zero = _numbers(zeros, group, number, num_rows, zero_kind, FORMAT.group)
            if FORMAT.zero == "point":
                values = (values - zero) * scale
            else:
                values = values * scale + zero
        else:
            values = values * scale
    else:
        values = stored.to(tl.float32)
    if FORMAT.kept is not None:
        values = tl.where(is_kept, values, 0.0)
    tl.store(out + row.to(tl.int64) * out_stride + columns_of, values, mask=inside)
