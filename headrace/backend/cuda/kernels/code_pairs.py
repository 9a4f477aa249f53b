"""Converts codes to numbers two per register, by inline PTX that the interpreter cannot run.

Triton cannot express two numbers in a register. The results have the bits of plain operations:
tests/backend/cuda/test_code_pairs.py executes the instructions. Sums and products are fused
multiply-adds by 1 or with -0, because GPUs before Hopper have no other for bf16 pairs. A number
that two columns share comes as 32 bits for each of them, and only the first are read.
"""

import triton
import triton.language as tl

LESS = tl.constexpr("""{
    .reg .b32 w, one;
    mov.b32 one, 0x3F803F80;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 4;
    lop3.b32 $1, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 8;
    lop3.b32 $2, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, $0, one, $5;
    fma.rn.bf16x2 $1, $1, one, $6;
    fma.rn.bf16x2 $2, $2, one, $7;
    fma.rn.bf16x2 $3, $3, one, $8;
}""")
SMALL_FLOATS = tl.constexpr("""{
    .reg .b32 w, t, f, z;
    mov.b32 f, 0x7E807E80;
    mov.b32 z, 0x80008000;
    shl.b32 w, $4, 6;
    and.b32 t, w, 0x01C001C0;
    shl.b32 w, $4, 12;
    lop3.b32 $0, w, 0x80008000, t, 0xEA;
    shl.b32 w, $4, 2;
    and.b32 t, w, 0x01C001C0;
    shl.b32 w, $4, 8;
    lop3.b32 $1, w, 0x80008000, t, 0xEA;
    shr.u32 w, $4, 2;
    and.b32 t, w, 0x01C001C0;
    shl.b32 w, $4, 4;
    lop3.b32 $2, w, 0x80008000, t, 0xEA;
    shr.u32 w, $4, 6;
    and.b32 t, w, 0x01C001C0;
    lop3.b32 $3, $4, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $0, $0, f, z;
    fma.rn.bf16x2 $1, $1, f, z;
    fma.rn.bf16x2 $2, $2, f, z;
    fma.rn.bf16x2 $3, $3, f, z;
}""")
TWO_PARTS = tl.constexpr("""{
    .reg .b32 t;
    cvt.rn.bf16x2.f32 $0, $2, $2;
    and.b32 t, $0, 0xFFFF0000;
    sub.rn.f32 t, $2, t;
    cvt.rn.bf16x2.f32 $1, t, t;
}""")
SCALED = tl.constexpr("""{
    .reg .b32 t, z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 t, $1, $4, z;
    fma.rn.bf16x2 $0, $1, $2, t;
}""")
UPPER_TWICE = tl.constexpr("prmt.b32 $0, $1, $1, 0x3232;")
SCALED_BY_BF16 = tl.constexpr("""{
    .reg .b32 z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, $1, $2, z;
}""")
SCALED_IN_FLOAT32 = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    mul.rn.f32 a, a, $2;
    mul.rn.f32 b, b, $2;
    cvt.rn.bf16x2.f32 $0, b, a;
}""")
SCALED_WITH_MINIMA = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    fma.rn.f32 a, a, $2, $4;
    fma.rn.f32 b, b, $2, $4;
    cvt.rn.bf16x2.f32 $0, b, a;
}""")
BYTES = tl.constexpr("""{
    .reg .b32 m;
    mov.b32 m, 0x4B000000;
    prmt.b32 $0, $4, m, 0x7650;
    prmt.b32 $1, $4, m, 0x7652;
    prmt.b32 $2, $4, m, 0x7651;
    prmt.b32 $3, $4, m, 0x7653;
    sub.rn.f32 $0, $0, $5;
    sub.rn.f32 $1, $1, $5;
    sub.rn.f32 $2, $2, $5;
    sub.rn.f32 $3, $3, $5;
}""")
SCALED_BYTES = tl.constexpr("""{
    .reg .b32 m, a, b;
    mov.b32 m, 0x47000000;
    prmt.b32 a, $2, m, 0x7604;
    prmt.b32 b, $2, m, 0x7624;
    fma.rn.f32 a, a, $3, $5;
    fma.rn.f32 b, b, $3, $5;
    cvt.rn.bf16x2.f32 $0, b, a;
    prmt.b32 a, $2, m, 0x7614;
    prmt.b32 b, $2, m, 0x7634;
    fma.rn.f32 a, a, $7, $9;
    fma.rn.f32 b, b, $7, $9;
    cvt.rn.bf16x2.f32 $1, b, a;
}""")


@triton.jit
def subtract_zero(words, first, second, third, fourth):
    """Codes of 4 bits in 16-bit words, lowest first, plus numbers of -144 to -128, as bf16.

    A register has two words. One logical operation (0xEA: a & b | c) puts a code of each into the
    low bits of the fraction of 128, whose unit is 1: 0x4300 | code is 128 + code. The sum is an
    integer of -16 to 15, so it is exact.
    """
    return tl.inline_asm_elementwise(
        LESS,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, first, second, third, fourth],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def small_floats(words):
    """Codes of e2m1 in 16-bit words, lowest first, as bf16.

    As in `decode`, exponent and fraction become the low bits of bf16, which differs by the
    factor 2**126 (0x7E80): exact.
    """
    return tl.inline_asm_elementwise(
        SMALL_FLOATS,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled(codes, scales):
    """Codes [rows, PART] in bf16 times float16 scales [rows, 1], rounded once, as plain
    operations do.

    A scale of 11 bits is high + low: high is the nearest bf16, of 8 bits, and low a multiple of
    an eighth of its last bit, at most four of them. So code * low is exact, and the last
    operation rounds code * high + code * low, which is code * scale.
    """
    high, low = tl.inline_asm_elementwise(
        TWO_PARTS, "=&r,=r,r", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        SCALED,
        "=r,r,r,r,r,r",
        [codes, tl.broadcast_to(high, codes.shape), tl.broadcast_to(low, codes.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_by_bf16(codes, scales):
    """Codes [rows, PART] in bf16 times scales [rows, 1] in float32 that are numbers of bf16,
    rounded once.

    The upper half of such a scale is the scale in bf16.
    """
    pairs = tl.inline_asm_elementwise(
        UPPER_TWICE, "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        SCALED_BY_BF16,
        "=r,r,r,r",
        [codes, tl.broadcast_to(pairs, codes.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_in_float32(codes, scales, minima, ADDS: tl.constexpr):
    """Codes in bf16 times float32 scales, plus minima with ADDS, all [rows, PART].

    A bf16 is the upper half of its float32. The conversion has its second operand in the lower
    half. A code has at most 5 bits and a scale that comes with minima at most 17, so their product
    is exact, and fusing it with the sum changes nothing.
    """
    if ADDS:
        numbers = tl.inline_asm_elementwise(
            SCALED_WITH_MINIMA,
            "=r,r,r,r,r,r",
            [codes, scales, minima],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            SCALED_IN_FLOAT32,
            "=r,r,r,r",
            [codes, scales],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return numbers


@triton.jit
def from_bytes(words, less):
    """Unsigned bytes of 16-bit words, lowest first, minus integers, as float32.

    A byte in the fraction of 2**23 (0x4B000000), whose unit is 1, is 2**23 more: `less` includes
    that.
    """
    return tl.inline_asm_elementwise(
        BYTES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, less],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_bytes(words, first, second):
    """Unsigned bytes of 16-bit words, lowest first, minus 128, times scales of at most 11 bits,
    rounded to bf16 once. `first` and `second` are the scales of both, [rows, PART].

    A byte in the second byte of the fraction of 2**15 (0x47000000) is 2**15 more. The scale times
    -(2**15 + 128) has at most 20 bits, so the fused sum is the exact product.
    """
    return tl.inline_asm_elementwise(
        SCALED_BYTES,
        "=&r,=r,r,r,r,r,r,r,r,r,r",
        [words, first, first * -32896.0, second, second * -32896.0],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
