"""Products of rows with a packed matrix, shared by the kernels of linear ops, experts and heads.

A product sums over columns in order in one float32 accumulator, whatever the tile, so a row has
the same bits in every batch. Codes become float32 in registers and are rounded once to the type
that tensor cores multiply.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.code_pairs import (
    scaled,
    scaled_widely,
    small_floats,
    subtract_zero,
)
from headrace.backend.cuda.kernels.quantise_rows import is_outlier
from headrace.backend.cuda.layout import SUPER_BLOCK, WeightLayout
from headrace.backend.cuda.packing import PackedWeight
from headrace.quant.spec import CODEBOOKS

_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)
_IS_INTERPRETED = tl.constexpr(is_interpreting())


def multiplies_in_pairs(layout: WeightLayout) -> bool:
    """Whether codes are scaled two at a time in bf16: integers of at most 5 bits, or halves, with
    scales of at most 11 bits.
    """
    is_short = (
        layout.store == "int4"
        and layout.scale in ("f16", "bf16")
        and layout.lookup in ((), CODEBOOKS["e2m1"])
    )
    return (
        is_short and layout.zero != "minimum" and (not layout.group or layout.group >= layout.part)
    )


def weight_args(weight: PackedWeight) -> tuple[Any, ...]:
    """Tensors of a weight as kernel arguments; the codes stand in for absent tables."""
    codes = weight.codes
    return codes, *(
        codes if t is None else t
        for t in (weight.scales, weight.zeros, weight.lookup, weight.column_order)
    )


def weight_constants(weight: PackedWeight, activations: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of a weight's layout and of the activations' type."""
    layout = weight.layout
    is_wide = activations == torch.float32 or layout.is_wide
    return {
        "STORE": layout.store,
        "SCALE": layout.scale or "",
        "ZERO": layout.zero,
        "ZERO_STORE": layout.zero_store or "",
        "OFFSET": layout.offset,
        "LOOKUP": ""
        if not layout.lookup
        else "e2m1"
        if layout.lookup == CODEBOOKS["e2m1"]
        else "table",
        "ORDERED": weight.column_order is not None,
        "GROUP": layout.group,
        "PART": layout.part,
        "COMPUTE": tl.float32 if is_wide else tl.bfloat16,
        # float16 has no more digits than TF32: tensor cores multiply it without loss.
        "IN_PAIRS": multiplies_in_pairs(layout) and not is_wide and not is_interpreting(),
        "PRECISION": "tf32" if layout.store == "f16" and activations != torch.float32 else "ieee",
    }


@triton.jit
def halves(words, NUMBER: tl.constexpr):
    """The two 16-bit numbers of each word, in float32."""
    if NUMBER == "bf16":
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def super_scale_word(block, GROUP: tl.constexpr):
    """Index of the word with the super-block scale of a row: the first of two."""
    return block // 2 * (_SUPER_BLOCK // (2 * GROUP) + 1)


@triton.jit
def super_scale(words, block):
    """Super-block scale, in float32."""
    low, high = halves(words, "f16")
    return tl.where(block % 2 == 0, low, high)


@triton.jit
def times_super_scale(super_scales, words, byte, NUMBER: tl.constexpr):
    """Super-block scale times the sub-scale in a byte of each word; exact in float32."""
    steps = (words >> (8 * byte)).to(tl.int8).to(tl.float32)
    return super_scales * (steps * 0.125 if NUMBER == "eighths" else steps)


@triton.jit
def over_columns(each, PART: tl.constexpr):
    """Repeat numbers of groups [rows, groups] for each of their columns, in all PART."""
    repeated = tl.broadcast_to(
        each[:, :, None], [each.shape[0], each.shape[1], PART // each.shape[1]]
    )
    return tl.reshape(repeated, [each.shape[0], PART])


@triton.jit
def broadcast_sub_scales(
    table,
    first,
    rows,
    num_rows,
    NUMBER: tl.constexpr,
    AT: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    FEW: tl.constexpr,
):
    """Numbers of a table of super-block scales and sub-scales, for each column.

    A tile has whole words, found by its first column, so its halves load shared words once. With
    FEW rows of x, numbers are built from words in registers without conditions on columns. Each
    thread then makes the numbers that it multiplies, and none move through shared memory.
    """
    block = first // _SUPER_BLOCK
    super_scales = super_scale(
        tl.load(table + super_scale_word(block, GROUP) * num_rows + rows), block
    )
    at = first // (4 * GROUP) + AT // (4 * GROUP) + block // 2 + 1
    words = tl.load(table + at * num_rows + rows)
    byte: tl.constexpr = AT // GROUP % 4
    if FEW and PART == 2 * GROUP:
        numbers = over_columns(
            tl.join(
                times_super_scale(super_scales, words, byte, NUMBER),
                times_super_scale(super_scales, words, byte + 1, NUMBER),
            ),
            PART,
        )
    elif FEW and PART == 4 * GROUP and GROUP >= 32:
        even = tl.join(
            times_super_scale(super_scales, words, 0, NUMBER),
            times_super_scale(super_scales, words, 2, NUMBER),
        )
        odd = tl.join(
            times_super_scale(super_scales, words, 1, NUMBER),
            times_super_scale(super_scales, words, 3, NUMBER),
        )
        numbers = over_columns(tl.reshape(tl.join(even, odd), [rows.shape[0], 4]), PART)
    else:
        column = tl.arange(0, PART)[None, :]
        words = tl.broadcast_to(words[:, None], [rows.shape[0], PART])
        for more in tl.static_range(1, PART // (4 * GROUP)):
            words = tl.where(
                column < 4 * GROUP * more,
                words,
                tl.load(table + (at + more) * num_rows + rows)[:, None],
            )
        numbers = times_super_scale(
            tl.broadcast_to(super_scales[:, None], [rows.shape[0], PART]),
            words,
            (AT + column) // GROUP % 4,
            NUMBER,
        )
    return numbers


@triton.jit
def broadcast_scales(
    table,
    first,
    rows,
    num_rows,
    NUMBER: tl.constexpr,
    AT: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    FEW: tl.constexpr,
):
    """Numbers of a table for the columns of a tile from AT on, [rows, PART], of several groups."""
    group = (first + AT) // GROUP
    if NUMBER == "steps" or NUMBER == "eighths":
        numbers = broadcast_sub_scales(table, first, rows, num_rows, NUMBER, AT, GROUP, PART, FEW)
    elif NUMBER == "f32":
        groups = group + tl.arange(0, PART // GROUP)
        numbers = over_columns(tl.load(table + groups[None, :] * num_rows + rows[:, None]), PART)
    else:
        column = tl.arange(0, PART)[None, :]
        numbers = tl.zeros([rows.shape[0], PART], tl.float32)
        for pair in tl.static_range(PART // GROUP // 2):
            low, high = halves(tl.load(table + (group // 2 + pair) * num_rows + rows), NUMBER)
            its = tl.where(column < (2 * pair + 1) * GROUP, low[:, None], high[:, None])
            numbers = tl.where(column < 2 * pair * GROUP, numbers, its)
    return numbers


@triton.jit
def group_numbers(
    table,
    number,
    rows,
    num_rows,
    NUMBER: tl.constexpr,
    AT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Numbers of a table for a part of a tile that lies in one group, [rows, 1], in float32."""
    if NUMBER == "steps" or NUMBER == "eighths":
        block = number // (_SUPER_BLOCK // TILE)
        super_scales = super_scale(
            tl.load(table + super_scale_word(block, GROUP) * num_rows + rows), block
        )
        at = number * (TILE // (4 * GROUP)) + AT // (4 * GROUP) + block // 2 + 1
        numbers = times_super_scale(
            super_scales, tl.load(table + at * num_rows + rows), AT // GROUP % 4, NUMBER
        )
    elif (
        GROUP != 0 and 2 * GROUP <= TILE and NUMBER != "f32"
    ):  # which half of a word is known when this is compiled
        pair = number * (TILE // (2 * GROUP)) + AT // (2 * GROUP)
        numbers = halves(tl.load(table + pair * num_rows + rows), NUMBER)[AT // GROUP % 2]
    else:
        if GROUP == 0:
            group = 0
        elif GROUP > TILE:
            group = number // (GROUP // TILE)
        else:
            group = number * (TILE // GROUP) + AT // GROUP
        if NUMBER == "f32":
            numbers = tl.load(table + group * num_rows + rows)
        else:
            numbers = halves(
                tl.load(table + group // 2 * num_rows + rows) >> (group % 2 * 16), NUMBER
            )[0]
    return numbers[:, None]


@triton.jit
def numbers_of(
    table, number, rows, num_rows,
        NUMBER: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Numbers of a table for PART columns from AT on, float32 [rows, PART], or [rows, 1] for one
    group.

    8-bit and 16-bit numbers are loaded in words: only 32-bit loads can overlap with products.
    """
    if GROUP == 0 or GROUP >= PART:
        return group_numbers(table, number, rows, num_rows, NUMBER, AT, GROUP, TILE)
    else:
        return broadcast_scales(table, number * TILE, rows, num_rows, NUMBER, AT, GROUP, PART, FEW)


@triton.jit
def decode(codes, lookup, OFFSET: tl.constexpr, LOOKUP: tl.constexpr):
    """Decode codes to float32, before scales."""
    if LOOKUP == "table":
        values = tl.load(lookup + codes.to(tl.int32))
    elif (
        LOOKUP == "e2m1"
        # as the lowest numbers of float32, which have the same exponents and fractions but for a
        # factor
    ):
        values = ((codes & 7) << 22 | (codes & 8) << 28).to(
            tl.float32, bitcast=True
        ) * 8.507059173023462e37  # 2**126
    else:
        values = codes.to(tl.float32) if OFFSET == 0 else codes.to(tl.float32) + OFFSET
    return values


@triton.jit
def dequantise(
    codes, scales, zeros, lookup, number, rows, num_rows,
        SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr, OFFSET: tl.constexpr,
    LOOKUP: tl.constexpr,
        AT: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Turn codes [rows, PART] of a tile from AT on into the numbers of a product."""
    if SCALE == "":
        values = codes
    else:
        values = decode(codes, lookup, OFFSET, LOOKUP)
        scale = numbers_of(scales, number, rows, num_rows, SCALE, AT, GROUP, PART, TILE, FEW)
        if ZERO == "point":
            values = (
                values
                - numbers_of(zeros, number, rows, num_rows, ZERO_STORE, AT, GROUP, PART, TILE, FEW)
            ) * scale
        elif ZERO == "minimum":
            values = values * scale + numbers_of(
                zeros, number, rows, num_rows, ZERO_STORE, AT, GROUP, PART, TILE, FEW
            )
        else:
            values = values * scale
    return values.to(COMPUTE)


@triton.jit
def activations(
    x,
    row_offsets,
    row_mask,
    order,
    first,
    columns,
    ORDERED: tl.constexpr,
    PART: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Load PART columns of rows from `first` on, in the matrix's order; 0 after the last column."""
    k = first + tl.arange(0, PART)
    at = tl.load(order + k, mask=k < columns, other=0) if ORDERED else k
    return tl.load(
        x + row_offsets[:, None] + at[None, :],
        mask=row_mask[:, None] & (k < columns)[None, :],
        other=0,
    ).to(COMPUTE)


@triton.jit
def addend(
    zeros, number, rows, num_rows,
        ZERO: tl.constexpr, ZERO_STORE: tl.constexpr, OFFSET: tl.constexpr, AT: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The number that `subtract_zero` adds to the codes of a tile from AT on, [rows, PART]."""
    if ZERO == "point":
        added = -128.0 - group_numbers(
            zeros, number, rows, num_rows, ZERO_STORE, AT, GROUP, 4 * PART
        )
    else:
        added = tl.full([1, 1], OFFSET - 128, tl.float32)
    return tl.broadcast_to(added.to(tl.bfloat16), [rows.shape[0], PART])


@triton.jit
def product(
    acc, x, row_offsets, row_mask, columns, codes, scales, zeros, lookup, order, rows, num_rows,
        STORE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr,
    OFFSET: tl.constexpr, LOOKUP: tl.constexpr,
        ORDERED: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, COMPUTE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute acc + x @ weight.T for rows of x at `row_offsets`: [rows of x, rows]."""
    few: tl.constexpr = row_offsets.shape[0] < 64  # tensor cores then take numbers from registers
    tile: tl.constexpr = 4 * PART if STORE == "int4" else PART
    num_tiles = tl.cdiv(columns, tile)
    at = codes + rows.to(tl.int64)[:, None] * (num_tiles * PART) + tl.arange(0, PART)[None, :]
    for number in range(0, num_tiles):
        stored = tl.load(at + number * PART)
        is_whole: tl.constexpr = STORE == "int4" and LOOKUP == "" and not _IS_INTERPRETED
        is_bf16: tl.constexpr = tl.bfloat16 == COMPUTE
        point: tl.constexpr = (
            ZERO if IN_PAIRS else ""
        )  # else zero points are subtracted where numbers are scaled
        if is_whole:
            four = subtract_zero(
                stored,
                addend(zeros, number, rows, num_rows, point, ZERO_STORE, OFFSET, 0, GROUP, PART),
                addend(zeros, number, rows, num_rows, point, ZERO_STORE, OFFSET, PART, GROUP, PART),
                addend(
                    zeros, number, rows, num_rows, point, ZERO_STORE, OFFSET, 2 * PART, GROUP, PART
                ),
                addend(
                    zeros, number, rows, num_rows, point, ZERO_STORE, OFFSET, 3 * PART, GROUP, PART
                ),
            )
        elif IN_PAIRS:
            four = small_floats(stored)
        for part in tl.static_range(tile // PART):
            if IN_PAIRS:
                w = scaled(
                    four[part],
                    numbers_of(
                        scales, number, rows, num_rows, SCALE, part * PART, GROUP, PART, tile, few
                    ),
                )
            elif is_whole and ZERO != "point" and is_bf16:
                scale = numbers_of(
                    scales, number, rows, num_rows, SCALE, part * PART, GROUP, PART, tile, few
                )
                minimum = scale
                if ZERO == "minimum":
                    minimum = numbers_of(
                        zeros,
                        number,
                        rows,
                        num_rows,
                        ZERO_STORE,
                        part * PART,
                        GROUP,
                        PART,
                        tile,
                        few,
                    )
                w = scaled_widely(four[part], scale, minimum, ZERO == "minimum")
            else:
                its = (
                    four[part]
                    if is_whole
                    else stored.to(tl.int32) >> (4 * part) & 15
                    if STORE == "int4"
                    else stored
                )
                w = dequantise(
                    its, scales, zeros, lookup, number, rows, num_rows,
                                        SCALE, ZERO, ZERO_STORE, 0 if is_whole else OFFSET, LOOKUP,
                    part * PART, GROUP, PART, tile, COMPUTE, few,
                )  # fmt: skip
            a = activations(
                x,
                row_offsets,
                row_mask,
                order,
                number * tile + part * PART,
                columns,
                ORDERED,
                PART,
                COMPUTE,
            )
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def int8_product(
    x_codes, x_scales, x, m, row_mask, code_offsets, row_offsets, columns, codes, scales, rows,
    PART: tl.constexpr, OUTLIERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply int8 rows [rows, whole tiles] with an int8 matrix, both scaled by row; sums are
    exact.

    With OUTLIERS the numbers of x that the codes leave out are multiplied as floats, in two bf16
    parts; bf16 represents all codes of weights.
    """
    k = tl.arange(0, PART)
    num_tiles = tl.cdiv(columns, PART)
    at = codes + rows.to(tl.int64)[:, None] * (num_tiles * PART) + k[None, :]
    exact = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    wide = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(0, num_tiles):
        w = tl.trans(tl.load(at + number * PART))
        first = number * PART
        a = tl.load(
            x_codes + code_offsets[:, None] + (first + k)[None, :], mask=row_mask[:, None], other=0
        )
        exact = tl.dot(a, w, exact, out_dtype=tl.int32)
        if OUTLIERS:
            v = tl.load(
                x + row_offsets[:, None] + (first + k)[None, :],
                mask=row_mask[:, None] & (first + k < columns)[None, :],
                other=0,
            )
            v = tl.where(is_outlier(v.to(tl.float32)), v.to(tl.float32), 0.0)
            if tl.max(tl.abs(v)) > 0:
                high, weights = v.to(tl.bfloat16), w.to(tl.float32).to(tl.bfloat16)
                wide = tl.dot((v - high.to(tl.float32)).to(tl.bfloat16), weights, wide)
                wide = tl.dot(high, weights, wide)
    scale = tl.load(x_scales + m, mask=row_mask, other=0.0)
    return (exact.to(tl.float32) * scale[:, None] + wide) * tl.load(scales + rows)[None, :]
