"""Loads of attention: queries, and tiles of keys or values in the type that is multiplied."""

import triton
import triton.language as tl


@triton.jit
def load_queries(
    q, row, stride, head, valid, FIRST: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Load columns of queries from `FIRST` on, in the planes and the type of keys."""
    column = FIRST + tl.arange(0, COLS)
    mask = valid[:, None] & (column < DIM)[None, :]
    numbers = tl.load(q + (row * stride + head * DIM)[:, None] + column[None, :], mask, 0.0)
    if FORMAT == "f32":
        return (numbers,)
    elif FORMAT == "f16":
        return (numbers.to(tl.float16),)
    elif FORMAT == "bf16":
        return (numbers.to(tl.bfloat16),)
    else:
        if FORMAT == "fp8":
            numbers = numbers * FP8_HALF
        even, odd = tl.split(tl.reshape(numbers, (row.shape[0], COLS // 2, 2)))
        return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def block_place(
    tile, kv_head, table, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """Place in the store of the first key of a tile, all of which lies in one block."""
    first = tile * KEYS
    block = tl.load(table + first // BLOCK).to(tl.int64)
    return (block * KV_HEADS + kv_head) * BLOCK + first % BLOCK


@triton.jit
def path_places(
    index, seen, kv_head, table, base, path, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Places of keys in the store, by index among the visible keys: from `base` on the ancestors
    that `path` lists.
    """
    in_tree = seen & (index >= base)
    position = tl.where(in_tree, base + tl.load(path + (index - base), in_tree, 0), index)
    block = tl.load(table + position // BLOCK, seen, 0).to(tl.int64)
    return (block * KV_HEADS + kv_head) * BLOCK + position % BLOCK


@triton.jit
def load_tile(
        cache, first, at, seen,
        FIRST: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
    HAS_PTX: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Load columns from `FIRST` on of the keys or values at `first + at`; zeros if they are not
    seen.

    8-bit codes come as two planes, of the even and the odd columns, and without their scales. If
    the tile is `IS_TURNED`, which no bit depends on, words of two codes are transposed before they
    are decoded: that takes one instruction for 8 words of a thread.
    """
    IS_CODE: tl.constexpr = FORMAT == "int8" or FORMAT == "fp8"
    PACK: tl.constexpr = 2 if IS_CODE else 1
    column, place = FIRST // PACK + tl.arange(0, COLS // PACK), cache + first * (DIM // PACK)
    if IS_CODE and IS_TURNED:
        mask = seen[None, :]
        if FIRST + COLS > DIM:
            mask = mask & (column < DIM // PACK)[:, None]
        words = tl.load(place + (at[None, :] * (DIM // PACK) + column[:, None]), mask, 0)
        even, odd = _planes(words, FORMAT, HAS_PTX)
        return tl.trans(even), tl.trans(odd)
    else:
        mask = seen[:, None]
        if FIRST + COLS > DIM:
            mask = mask & (column < DIM // PACK)[None, :]
        numbers = tl.load(place + (at[:, None] * (DIM // PACK) + column[None, :]), mask, 0)
        if IS_CODE:
            return _planes(numbers, FORMAT, HAS_PTX)
        else:
            return (numbers,)


FP8_HALF = tl.constexpr(2.0**60)
"""Factor of queries and of the weights of values for fp8, and of sums over codes. It is a power of
two, so no bit changes.
"""

INT8_PLANES = tl.constexpr("""{
    .reg .b32 m, n;
    mov.b32 m, 0x7F007F00;
    mov.b32 n, 0xC000C000;
    and.b32 $0, $2, 0x00FF00FF;
    prmt.b32 $1, $2, 0, 0x4341;
    fma.rn.bf16x2 $0, $0, m, n;
    fma.rn.bf16x2 $1, $1, m, n;
}""")
"""A code is the bits of a bf16 number of code * 2**-133: those up to 127 are less than normal
numbers, and those from 128 on follow them in equal steps. Times 2**127, less 2.
"""
FP8_PLANES = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0xA280;
    prmt.b32 $1, $2, 0, 0xB391;
    shl.b32 $0, $0, 4;
    shl.b32 $1, $1, 4;
    and.b32 $0, $0, 0x87F087F0;
    and.b32 $1, $1, 0x87F087F0;
}""")
"""Exponent and digits of e4m3 get the places that bf16 has for them, and the sign its own: the
number times 2**-120, `FP8_HALF` squared.
"""


@triton.jit
def _planes(words, FORMAT: tl.constexpr, HAS_PTX: tl.constexpr):
    """The lower and the upper codes of words as bf16: int8 codes less 128 over 64, or fp8 times
    2**-120.
    """
    if not HAS_PTX:
        words = words.to(tl.int32)
        return _plane(words & 0xFF, FORMAT), _plane(words >> 8 & 0xFF, FORMAT)
    elif FORMAT == "int8":
        return tl.inline_asm_elementwise(
            INT8_PLANES,
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            FP8_PLANES,
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _plane(code, FORMAT: tl.constexpr):
    if FORMAT == "int8":
        return ((code - 128).to(tl.float32) * 0.015625).to(tl.bfloat16)
    else:
        bits = (code & 0x7F) << 4 | (code & 0x80) << 8
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def sum_factor(FORMAT: tl.constexpr):
    """Factor of sums over codes in planes."""
    return 64.0 if FORMAT == "int8" else FP8_HALF if FORMAT == "fp8" else 1.0


@triton.jit
def load_scales(scales, first, at, seen, IS_KEY: tl.constexpr, FORMAT: tl.constexpr):
    """Factor of the codes of each key or value, and the number that is added to all of its columns.

    For the int8 values of other rows, NaN in a latent key must not become a number.
    """
    if FORMAT == "int8":
        word = tl.load(scales + first + at, seen, 0)
        least = (word << 16).to(tl.float32, bitcast=True)
        step = (word & -65536).to(tl.float32, bitcast=True)
        if not IS_KEY:
            least = tl.where(least == least, least, 0.0)
        return step, least
    else:
        scale = tl.load(scales + first + at, seen, 0.0)
        if not IS_KEY:
            scale = tl.where(scale == scale, scale, 0.0)
        return scale, scale
