"""Products of rows with a packed matrix: what kernels of linear ops, experts and heads have in
common.

A product sums over the columns in their order, in one float32 accumulator for each number, whatever
the shape of the tile: so a row has the same bits in every batch. Codes become numbers in registers,
in float32, and are rounded once to what tensor cores multiply.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.code_pairs import less, scaled, scaled_widely, small_floats
from headrace.backend.cuda.kernels.quantise_rows import is_outlier
from headrace.backend.cuda.layout import SUPER_BLOCK, WeightLayout
from headrace.backend.cuda.packing import PackedWeight
from headrace.quant.spec import CODEBOOKS

_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)
_IS_INTERPRETED = tl.constexpr(is_interpreting())


def multiplies_in_pairs(layout: WeightLayout) -> bool:
    """Whether codes are scaled two at a time, in bf16: whole numbers of at most 5 bits, or halves,
    with scales of at most 11.
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
    """The tensors of a weight, as kernels take them; the codes stand for tables that it has not,
    and are not read as such.
    """
    codes = weight.codes
    return codes, *(
        codes if t is None else t
        for t in (weight.scales, weight.zeros, weight.lookup, weight.column_order)
    )


def weight_constants(weight: PackedWeight, activations: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for by the layout of a weight, and by the activations that it is
    multiplied with.
    """
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
    """The two numbers of 16 bits in each word, in float32."""
    if NUMBER == "bf16":
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def unit_word(block, GROUP: tl.constexpr):
    """Which word of a row has the unit of a super-block: the first of those of two."""
    return block // 2 * (_SUPER_BLOCK // (2 * GROUP) + 1)


@triton.jit
def unit(words, block):
    """The unit of a super-block, in float32."""
    low, high = halves(words, "f16")
    return tl.where(block % 2 == 0, low, high)


@triton.jit
def stepped(units, words, byte, NUMBER: tl.constexpr):
    """Units times the steps in a byte of each word: float32 has all digits of a product."""
    steps = (words >> (8 * byte)).to(tl.int8).to(tl.float32)
    return units * (steps * 0.125 if NUMBER == "eighths" else steps)


@triton.jit
def over_columns(each, PART: tl.constexpr):
    """Numbers of groups [rows, groups] for each of their columns, in all PART."""
    repeated = tl.broadcast_to(
        each[:, :, None], [each.shape[0], each.shape[1], PART // each.shape[1]]
    )
    return tl.reshape(repeated, [each.shape[0], PART])


@triton.jit
def spread_steps(
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
    """The numbers of a table of units and steps, as `spread` has them.

    A tile has whole words, and they are found by its first column: so its halves load but once what
    they share. With FEW rows of x numbers are put together from words in registers, with no
    condition on columns: then the compiler has each thread make those that it multiplies, where it
    would else move all of them through shared memory.
    """
    block = first // _SUPER_BLOCK
    units = unit(tl.load(table + unit_word(block, GROUP) * num_rows + rows), block)
    at = first // (4 * GROUP) + AT // (4 * GROUP) + block // 2 + 1
    words = tl.load(table + at * num_rows + rows)
    byte: tl.constexpr = AT // GROUP % 4
    if FEW and PART == 2 * GROUP:
        numbers = over_columns(
            tl.join(stepped(units, words, byte, NUMBER), stepped(units, words, byte + 1, NUMBER)),
            PART,
        )
    elif FEW and PART == 4 * GROUP and GROUP >= 32:
        even = tl.join(stepped(units, words, 0, NUMBER), stepped(units, words, 2, NUMBER))
        odd = tl.join(stepped(units, words, 1, NUMBER), stepped(units, words, 3, NUMBER))
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
        numbers = stepped(
            tl.broadcast_to(units[:, None], [rows.shape[0], PART]),
            words,
            (AT + column) // GROUP % 4,
            NUMBER,
        )
    return numbers


@triton.jit
def spread(
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
    """The numbers of a table for the columns of a tile from AT on, where `first` is its first
    column: [rows, PART], of several groups.
    """
    group = (first + AT) // GROUP
    if NUMBER == "steps" or NUMBER == "eighths":
        numbers = spread_steps(table, first, rows, num_rows, NUMBER, AT, GROUP, PART, FEW)
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
    """The numbers of a table for the columns of a tile from AT on, where one serves all: [rows, 1],
    in float32.
    """
    if NUMBER == "steps" or NUMBER == "eighths":
        block = number // (_SUPER_BLOCK // TILE)
        units = unit(tl.load(table + unit_word(block, GROUP) * num_rows + rows), block)
        at = number * (TILE // (4 * GROUP)) + AT // (4 * GROUP) + block // 2 + 1
        numbers = stepped(units, tl.load(table + at * num_rows + rows), AT // GROUP % 4, NUMBER)
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
    """The numbers of a table for PART columns of a tile from AT on, in float32: [rows, PART], or
    [rows, 1] where one serves all.

    Those of 8 and 16 bits are loaded in words: only loads of 32 bits can be on their way while
    others are multiplied.
    """
    if GROUP == 0 or GROUP >= PART:
        return group_numbers(table, number, rows, num_rows, NUMBER, AT, GROUP, TILE)
    else:
        return spread(table, number * TILE, rows, num_rows, NUMBER, AT, GROUP, PART, FEW)


@triton.jit
def meaning(codes, lookup, OFFSET: tl.constexpr, LOOKUP: tl.constexpr):
    """What codes stand for before they are scaled, in float32."""
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
def dequantised(
    codes, scales, zeros, lookup, number, rows, num_rows,
        SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr, OFFSET: tl.constexpr,
    LOOKUP: tl.constexpr,
        AT: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Codes [rows, PART] of the columns of a tile from AT on as numbers that a product takes."""
    if SCALE == "":
        values = codes
    else:
        values = meaning(codes, lookup, OFFSET, LOOKUP)
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
    """PART columns of rows from `first` on, in the order of the matrix; 0 behind the last of
    `columns`.
    """
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
    """What `less` adds to the codes of the columns of a tile from AT on, and 128: [rows, PART]."""
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
    """Acc + x @ weight.T, for rows of x that lie at `row_offsets` and the given `rows` of the
    matrix: [rows of x, rows].
    """
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
            four = less(
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
                w = dequantised(
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
    """Rows in int8, [rows, whole tiles], times a matrix in int8, each with a scale for each row:
    sums of integers are exact.

    With OUTLIERS the numbers of x that the codes leave out are multiplied as floats, in two parts
    of bf16, which has all codes of weights.
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
