"""Loads of attention: queries, and tiles of keys or values in the type that is multiplied."""

import triton
import triton.language as tl


@triton.jit
def load_queries(q, row, stride, head, valid, column, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Load queries in the type that keys are multiplied in."""
    mask = valid[:, None] & (column < DIM)[None, :]
    numbers = tl.load(q + (row * stride + head * DIM)[:, None] + column[None, :], mask, 0.0)
    if FORMAT == "f32":
        return numbers
    elif FORMAT == "f16":
        return numbers.to(tl.float16)
    else:
        return numbers.to(tl.bfloat16)


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
    HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Load columns from `FIRST` on of the keys or values at `first + at`; zeros if they are not
    seen.

    Codes come without their scale: bf16 has all digits of fp8 codes, and of int8 codes less 128.
    Two codes are read as one word. The compiler would permute the columns of single bytes, but
    only for some instructions.
    """
    IS_CODE: tl.constexpr = FORMAT == "int8" or FORMAT == "fp8"
    PACK: tl.constexpr = 2 if IS_CODE else 1
    column = FIRST // PACK + tl.arange(0, COLS // PACK)
    mask = seen[:, None]
    if FIRST + COLS > DIM:
        mask = mask & (column < DIM // PACK)[None, :]
    place = cache + first * (DIM // PACK)
    numbers = tl.load(place + (at[:, None] * (DIM // PACK) + column[None, :]), mask, 0)
    if IS_CODE:
        words = numbers.to(tl.int32)
        if HAS_PTX:
            pair = _pair(words, FORMAT)
            low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
            low, high = low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
        else:
            low, high = _decoded(words & 0xFF, FORMAT), _decoded(words >> 8, FORMAT)
        return tl.reshape(tl.join(low, high), (at.shape[0], COLS))
    else:
        return numbers


@triton.jit
def _decoded(code, FORMAT: tl.constexpr):
    """Value of 8-bit codes, as bf16."""
    if FORMAT == "int8":
        return (code - 128).to(tl.float32).to(tl.bfloat16)
    else:
        # Exponent and digits of e4m3 get the places that float32 has for them, for 2**-120 of
        # the number.
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)


@triton.jit
def _pair(word, FORMAT: tl.constexpr):
    """Values of the two codes of a word as two bf16 in 32 bits, in 2 instructions a code."""
    if FORMAT == "int8":
        # 7 digits of a code are added to 128. Less 128 or 256, by the eighth, that is the code
        # less 128.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, a, b, c;
            mov.b32 c, 0xBF80BF80;
            prmt.b32 s, $1, 0, 0x4140;
            lop3.b32 a, s, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, s, 0x00800080, 0x43004300, 0xAE;
            fma.rn.bf16x2 $0, b, c, a;
            }
            """,
            "=r,r",
            [word],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        # Exponent and digits of e4m3 get the places that bf16 has for them, for 2**-120 of the
        # number.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, a, b, c;
            mov.b32 b, 0x7B807B80;
            mov.b32 c, 0x80008000;
            prmt.b32 s, $1, 0, 0x1404;
            shr.u32 a, s, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 a, s, 0x80008000, a, 0xEA;
            fma.rn.bf16x2 $0, a, b, c;
            }
            """,
            "=r,r",
            [word],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


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
