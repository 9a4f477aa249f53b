"""Constants and tables of a packed matrix, as the kernels that read it need them."""

from dataclasses import replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.layout import SUPER_BLOCK, ScaleStore, WeightLayout
from headrace.backend.cuda.packing import PackedWeight
from headrace.quant.spec import CODEBOOKS
from headrace.record import frozen

_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)

# Numbers; codes of which a word has one, two (bytes) or four (nibbles); or rows that are
# multiplied as int8 with rows in int8, perhaps with floats for large activations
Family = Literal["numbers", "codes", "bytes", "nibbles", "int8 rows", "int8 rows, outliers"]
# How codes become numbers: by plain operations, or by PTX on pairs of them
Decoder = Literal["plain", "pairs", "pairs by bf16", "pairs in f32", "bytes", "fused bytes"]


@frozen
class WeightFormat:
    """A weight's layout, and how it is multiplied: one compile-time constant of a kernel."""

    family: Family
    planes: int  # Codes in a stored word
    tile: int  # Columns of a tile
    group: int
    scale: ScaleStore | Literal[""]
    zero: Literal["none", "point", "minimum"]
    zero_store: ScaleStore | Literal[""]
    offset: int
    lookup: Literal["", "e2m1", "table"]
    is_ordered: bool  # Whether activations have another order of columns
    is_whole: bool  # Whether the columns fill their tiles
    compute: Literal["bf16", "f32"]
    precision: Literal["ieee", "tf32"]
    decoder: Decoder
    kept: "WeightFormat | None" = None  # Of 2:4 weights, the matrix of their kept values


def weight_format(
    weight: PackedWeight, activations: torch.dtype, *, in_int8: bool = False
) -> WeightFormat:
    """Describe the product of a weight with activations of a type, or with rows in int8."""
    layout = weight.layout
    if layout.is_sparse:
        half = weight._replace(layout=layout.kept, cols=weight.cols // 2)
        kept = weight_format(half, activations, in_int8=in_int8)
        whole = weight.cols % layout.tile == 0
        return replace(kept, tile=layout.tile, group=layout.group, is_whole=whole, kept=kept)
    is_wide = activations == torch.float32 or layout.is_wide
    is_e2m1 = layout.lookup == CODEBOOKS["e2m1"]
    return WeightFormat(
        family=_family(layout, in_int8),
        planes=layout.planes,
        tile=layout.tile,
        group=layout.group,
        scale=layout.scale or "",
        zero=layout.zero,
        zero_store=layout.zero_store or "",
        offset=layout.offset,
        lookup="" if not layout.lookup else "e2m1" if is_e2m1 else "table",
        is_ordered=weight.column_order is not None,
        is_whole=weight.cols % layout.tile == 0,
        compute="f32" if is_wide else "bf16",
        # float16 has no more digits than TF32: tensor cores multiply it without loss.
        precision="tf32" if layout.store == "f16" and activations != torch.float32 else "ieee",
        decoder="plain" if is_wide or not architecture().has_ptx else decoder_of(layout),
    )


def _family(layout: WeightLayout, in_int8: bool) -> Family:
    if in_int8:
        return "int8 rows, outliers" if layout.outliers else "int8 rows"
    if layout.scale is None:
        return "numbers"
    families: dict[int, Family] = {1: "codes", 2: "bytes", 4: "nibbles"}
    return families[layout.planes]


def decoder_of(layout: WeightLayout) -> Decoder:
    """How a GPU decodes a layout to bf16.

    Scales of at most 11 bits have two parts in bf16, by which integers of at most 5 bits, or
    halves, are multiplied in pairs; a scale in bf16 has one. Bytes times such scales are exact
    in float32.
    """
    has_short_scale = layout.scale in ("f16", "bf16")
    if layout.planes == 4 and layout.lookup in ((), CODEBOOKS["e2m1"]):
        is_one_group = not layout.group or layout.group >= layout.part
        if has_short_scale and is_one_group and layout.zero != "minimum":
            return "pairs by bf16" if layout.scale == "bf16" else "pairs"
        is_exact = layout.zero == "none" or (layout.zero == "minimum" and layout.scale != "f32")
        if not layout.lookup and is_exact:
            return "pairs in f32"
    if layout.planes == 2 and not layout.lookup:
        return "fused bytes" if has_short_scale and layout.zero == "none" else "bytes"
    return "plain"


def weight_args(weight: PackedWeight) -> tuple[Any, ...]:
    """Tensors of a weight as kernel arguments; the codes stand in for absent tables.

    2:4 weights have no zeros, and their places come as that argument.
    """
    codes = weight.codes
    return codes, *(
        codes if t is None else t
        for t in (
            weight.scales,
            weight.zeros if weight.places is None else weight.places,
            weight.lookup,
            weight.column_order,
        )
    )


@triton.jit
def halves(words, KIND: tl.constexpr):
    """The two 16-bit numbers of each word, in float32."""
    if KIND == "bf16":
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def super_scale(words):
    """Super-block scale in the low half of a word, in float32."""
    return words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def times_super_scale(super_scales, words, byte, KIND: tl.constexpr):
    """Super-block scale times the sub-scale in a byte of each word; exact in float32."""
    steps = (words >> (8 * byte)).to(tl.int8).to(tl.float32)
    return super_scales * (steps * 0.125 if KIND == "eighths" else steps)


@triton.jit
def _of_one_group(
    table, tile, rows, num_rows,
    KIND: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Numbers of a plane of a tile that lies in one group, float32 [rows]."""
    if KIND == "steps" or KIND == "eighths":
        block = tile // (_SUPER_BLOCK // TILE)
        first = block * (_SUPER_BLOCK // (4 * GROUP) + 1)
        super_scales = super_scale(tl.load(table + first * num_rows + rows))
        word = tile * (TILE // (4 * GROUP)) + AT // (4 * GROUP) + block + 1
        numbers = times_super_scale(
            super_scales, tl.load(table + word * num_rows + rows), AT // GROUP % 4, KIND
        )
    elif GROUP != 0 and 2 * GROUP <= TILE and KIND != "f32":  # the half is known when compiling
        word = tile * (TILE // (2 * GROUP)) + AT // (2 * GROUP)
        numbers = halves(tl.load(table + word * num_rows + rows), KIND)[AT // GROUP % 2]
    else:
        if GROUP == 0:
            group = 0
        elif GROUP > TILE:
            group = tile // (GROUP // TILE)
        else:
            group = tile * (TILE // GROUP) + AT // GROUP
        if KIND == "f32":
            numbers = tl.load(table + group * num_rows + rows)
        else:
            words = tl.load(table + group // 2 * num_rows + rows)
            numbers = halves(words >> (group % 2 * 16), KIND)[0]
    return numbers


@triton.jit
def _of_groups(
    table, tile, rows, num_rows,
    KIND: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Numbers of the groups of a plane of a tile, float32 [rows, groups], all in registers."""
    groups: tl.constexpr = PART // GROUP
    if KIND == "steps" or KIND == "eighths":
        block = tile // (_SUPER_BLOCK // TILE)
        first = block * (_SUPER_BLOCK // (4 * GROUP) + 1)
        super_scales = super_scale(tl.load(table + first * num_rows + rows))
        word = tile * (TILE // (4 * GROUP)) + AT // (4 * GROUP) + block + 1
        if groups == 2:
            words = tl.load(table + word * num_rows + rows)
            byte: tl.constexpr = AT // GROUP % 4
            numbers = tl.join(
                times_super_scale(super_scales, words, byte, KIND),
                times_super_scale(super_scales, words, byte + 1, KIND),
            )
        else:
            words = tl.load(
                table + (word + tl.arange(0, groups // 4)[None, :]) * num_rows + rows[:, None]
            )
            each = tl.broadcast_to(super_scales[:, None], words.shape)
            even = tl.join(
                times_super_scale(each, words, 0, KIND), times_super_scale(each, words, 2, KIND)
            )
            odd = tl.join(
                times_super_scale(each, words, 1, KIND), times_super_scale(each, words, 3, KIND)
            )
            numbers = tl.reshape(tl.join(even, odd), [rows.shape[0], groups])
    elif KIND == "f32":
        group = tile * (TILE // GROUP) + AT // GROUP + tl.arange(0, groups)
        numbers = tl.load(table + group[None, :] * num_rows + rows[:, None])
    else:
        word = tile * (TILE // (2 * GROUP)) + AT // (2 * GROUP) + tl.arange(0, groups // 2)
        low, high = halves(tl.load(table + word[None, :] * num_rows + rows[:, None]), KIND)
        numbers = tl.reshape(tl.join(low, high), [rows.shape[0], groups])
    return numbers


@triton.jit
def table_numbers(
    table, tile, rows, num_rows,
    KIND: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of PART columns of a tile from AT on, float32 [rows, 1] or [rows, groups].

    Numbers of 8 and 16 bits are loaded in words: only loads of 32 bits overlap with products.
    """
    if GROUP == 0 or GROUP >= PART:
        return _of_one_group(table, tile, rows, num_rows, KIND, AT, GROUP, TILE)[:, None]
    else:
        return _of_groups(table, tile, rows, num_rows, KIND, AT, GROUP, PART, TILE)


@triton.jit
def over_columns(numbers, PART: tl.constexpr):
    """Repeat numbers of groups [rows, groups] for each of their columns: [rows, PART]."""
    size: tl.constexpr = PART // numbers.shape[1]
    repeated = tl.broadcast_to(numbers[:, :, None], [numbers.shape[0], numbers.shape[1], size])
    return tl.reshape(repeated, [numbers.shape[0], PART])
