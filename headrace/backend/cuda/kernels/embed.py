"""Embeddings of tokens, some known only to the GPU, and of positions."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.product import (
    decode,
    halves,
    super_scale,
    super_scale_word,
    times_super_scale,
    weight_args,
    weight_constants,
)
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.backend.cuda.layout import SUPER_BLOCK
from headrace.backend.cuda.packing import PackedWeight


def embed(
    out: torch.Tensor,
    weight: PackedWeight,
    tokens: torch.Tensor,
    source: torch.Tensor,
    last_tokens: torch.Tensor,
) -> Launch:
    """Compute out[t] = weight[token of t], float32 [rows, cols].

    The token is `tokens[t]`, or `last_tokens[source[t]]` if `source` is not -1.
    """
    return _embed(out, weight, tokens, source, last_tokens)


def embed_position(out: torch.Tensor, weight: PackedWeight, positions: torch.Tensor) -> Launch:
    """Compute out[t] = weight[position of t]; positions are clipped to the last row."""
    return _embed(out, weight, positions, None, positions)


def _embed(
    out: torch.Tensor,
    weight: PackedWeight,
    index: torch.Tensor,
    source: torch.Tensor | None,
    last: torch.Tensor,
) -> Launch:
    constants = weight_constants(weight, torch.float32)
    block = power_of_2(min(weight.cols, 1024))
    return Launch(
        embed_kernel,
        (len(out), blocks(weight.cols, block)),
        (
            *(out, index, index if source is None else source, last, *weight_args(weight)[:4]),
            *(weight.rows, weight.cols, weight.layout.padded_cols(weight.cols), out.stride(0)),
        ),
        {
            **{
                name: constants[name]
                for name in (
                    "STORE",
                    "SCALE",
                    "ZERO",
                    "ZERO_STORE",
                    "OFFSET",
                    "LOOKUP",
                    "GROUP",
                    "PART",
                )
            },
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
        super_scales = super_scale(
            tl.load(table + super_scale_word(block, GROUP) * num_rows + row), block
        )
        numbers = times_super_scale(
            super_scales,
            tl.load(table + (group // 4 + block // 2 + 1) * num_rows + row),
            group % 4,
            NUMBER,
        )
    else:
        low, high = halves(tl.load(table + group // 2 * num_rows + row), NUMBER)
        numbers = tl.where(group % 2 == 0, low, high)
    return numbers


@triton.jit
def embed_kernel(
    out, index, source, last, codes, scales, zeros, lookup, num_rows, columns, padded, out_stride,
        STORE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr,
    OFFSET: tl.constexpr, LOOKUP: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, HAS_SOURCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of one row."""
    row, columns_of = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(index + row)
    if HAS_SOURCE:
        drawn_by = tl.load(source + row)
        number = tl.where(drawn_by >= 0, tl.load(last + tl.maximum(drawn_by, 0)), number)
    number = tl.minimum(number, num_rows - 1).to(tl.int64)
    inside = columns_of < columns
    k = tl.where(inside, columns_of, 0)
    if STORE == "int4":
        at = k // (4 * PART) * PART + k % PART
        stored = tl.load(codes + number * (padded // 4) + at)
        stored = (stored.to(tl.int32) >> (k // PART % 4 * 4)) & 15
    else:
        stored = tl.load(codes + number * padded + k)
    if SCALE != "":
        values = decode(stored, lookup, OFFSET, LOOKUP)
        group = k // GROUP if GROUP else k * 0
        scale = _numbers(scales, group, number, num_rows, SCALE, GROUP)
        if ZERO == "point":
            values = (values - _numbers(zeros, group, number, num_rows, ZERO_STORE, GROUP)) * scale
        elif ZERO == "minimum":
            values = values * scale + _numbers(zeros, group, number, num_rows, ZERO_STORE, GROUP)
        else:
            values = values * scale
    else:
        values = stored.to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + columns_of, values, mask=inside)
