"""Codes of 4 bits as numbers in bf16, two in a register at a time: instructions of a GPU, which the
interpreter has not.

Triton has no way to say that a register has two of them, and takes them apart. What comes out has
the bits that plain operations give: tests/backend/cuda/test_code_pairs.py carries the instructions
out. A number less another, or times another, is a fused multiply-add here, by 1 or plus -0, as GPUs
before Hopper have no other for two numbers in bf16.
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
SCALED = tl.constexpr("""{
    .reg .b32 t, z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 t, $1, $3, z;
    fma.rn.bf16x2 $0, $1, $2, t;
}""")
SCALED_WIDELY = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    mul.rn.f32 a, a, $2;
    mul.rn.f32 b, b, $3;
    cvt.rn.bf16x2.f32 $0, b, a;
}""")
SCALED_WITH_MINIMA = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    mul.rn.f32 a, a, $2;
    mul.rn.f32 b, b, $3;
    add.rn.f32 a, a, $4;
    add.rn.f32 b, b, $5;
    cvt.rn.bf16x2.f32 $0, b, a;
}""")


@triton.jit
def less(words, first, second, third, fourth):
    """The codes of 4 bits in words of 16, the lowest first, plus numbers of -144 to -128, as bf16:
    codes less whole numbers of 0 to 16.

    A register has two words. One logical operation puts a code of each into the lowest bits of the
    fraction of 128, where a unit of bf16 is 1 (0xEA is a & b | c, which masks what is shifted from
    one word into the other): 0x4300 | code is 128 + code. The sum is a whole number of -16 to 15:
    exact.
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
    """The codes of e2m1 in words of 16, the lowest first, as bf16.

    As in `meaning`: exponent and fraction become the lowest of those of bf16, which differ by the
    factor 2**126, 0x7E80: exact. `0xEA` is a & b | c, and what is shifted from one word into the
    other is masked.
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
def scaled(codes, scale):
    """Codes [rows, PART] in bf16 times scales [rows, 1], rounded once: the bits that `dequantised`
    gives them.

    A float16 scale of 11 bits is high + low, where high is the bf16 nearest to it, of 8 bits, and
    low a multiple of an eighth of its last bit, four of them at most: exact. So code * low is a
    multiple of that, or of its half, and at most 64 of it: exact. The last operation rounds code *
    high + code * low, which is code * scale.
    """
    high = scale.to(tl.bfloat16)
    low = (scale - high.to(tl.float32)).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        SCALED,
        "=r,r,r,r",
        [codes, tl.broadcast_to(high, codes.shape), tl.broadcast_to(low, codes.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_widely(codes, scale, minimum, ADDS: tl.constexpr):
    """Codes [rows, PART] in bf16 times scales in float32, plus minima with ADDS: the operations of
    `dequantised`, on pairs.

    A bf16 is the upper half of the float32 that it stands for. The conversion has its second
    operand in the lower half.
    """
    scale = tl.broadcast_to(scale, codes.shape)
    if ADDS:
        numbers = tl.inline_asm_elementwise(
            SCALED_WITH_MINIMA,
            "=r,r,r,r,r,r",
            [codes, scale, tl.broadcast_to(minimum, codes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            SCALED_WIDELY, "=r,r,r,r", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return numbers
