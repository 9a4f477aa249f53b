"""The instructions that make numbers of codes two at a time, carried out as PTX defines them, and
what products make of them.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from headrace.backend.cuda.architecture import H100
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels import (
    attention_load,
    code_pairs,
    product,
    weight_format,
)
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.weight_format import decoder_of
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.packing import pack
from headrace.quant.kv import round_bf16
from headrace.quant.spec import CODEBOOKS
from tests.backend.cuda.matrices import FORMAT_NAMES, random_matrix

Words = NDArray[np.uint32]
CODES = np.arange(16)


def bf16(numbers: Any) -> NDArray[np.uint32]:
    """The bits of numbers in bf16, rounded to nearest, ties to even."""
    return np.asarray(round_bf16(np.asarray(numbers, np.float32)), np.float32).view(
        np.uint32
    ) >> np.uint32(16)


def pair(low: NDArray[np.uint32], high: NDArray[np.uint32]) -> Words:
    return low | high << np.uint32(16)


def parts(words: Words) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both numbers of a register, in float32: the lower first."""
    return (words << np.uint32(16)).view(np.float32), (words & np.uint32(0xFFFF0000)).view(
        np.float32
    )


def fused(a: Words, b: Words, c: Words) -> Words:
    """a * b + c of both numbers, rounded once: float64 has all digits of the product, and of the
    sum of numbers as they are here.
    """
    sums = [
        x.astype(np.float64) * y + z for x, y, z in zip(parts(a), parts(b), parts(c), strict=True)
    ]
    assert all(
        np.array_equal(s, s.astype(np.float32).astype(np.float64), equal_nan=True) for s in sums
    )  # so it is rounded once
    return pair(*map(bf16, sums))


def plain(operation: Callable[..., Any]) -> Callable[..., Words]:
    return lambda *args: (
        operation(*(arg.view(np.float32) for arg in args)).astype(np.float32).view(np.uint32)
    )


def fused_in_float32(a: Words, b: Words, c: Words) -> Words:
    """a * b + c, rounded once: longdouble has all digits of the product, and of the sum of
    numbers as they are here.
    """
    x, y, z = (words.view(np.float32).astype(np.longdouble) for words in (a, b, c))
    return np.asarray(x * y + z).astype(np.float32).view(np.uint32)


def permuted(a: Words, b: Words, selector: np.uint32) -> Words:
    """The bytes of two registers that a selector names, four bits each, the lowest first."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros(both.shape, np.uint32)
    for place in range(4):
        byte, is_sign = int(selector) >> 4 * place & 7, int(selector) >> 4 * place & 8
        bits = (both >> np.uint64(8 * byte) & np.uint64(255)).astype(np.uint32)
        if is_sign:  # the highest bit of the byte, in all bits
            bits = np.where(bits & np.uint32(128), np.uint32(255), np.uint32(0))
        found |= bits << np.uint32(8 * place)
    return found


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: a & b | c,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": fused,
    "fma.rn.f32": fused_in_float32,
    "mul.rn.f32": plain(np.multiply),
    "sub.rn.f32": plain(np.subtract),
    "cvt.rn.bf16x2.f32": lambda high, low: pair(
        bf16(low.view(np.float32)), bf16(high.view(np.float32))
    ),
}


def carried_out(assembly: Any, num_outputs: int, *inputs: Words) -> list[Words]:
    """The outputs of instructions, which are numbered before the inputs."""
    registers = {f"${num_outputs + i}": words for i, words in enumerate(inputs)}
    for line in assembly.value.strip("{} \n").splitlines():
        name, *operands = re.split(r"[\s,;]+", line.strip(" ;"))
        if name == ".reg":
            continue
        assert (
            name != "lop3.b32" or operands[-1] == "0xEA"
        )  # a & b | c: of all a, b and c the bits 1110 1010
        values = [
            registers[word] if word in registers else np.uint32(int(word, 0))
            for word in operands[1:]
        ]
        registers[operands[0]] = np.asarray(INSTRUCTIONS[name](*values), np.uint32)
    return [registers[f"${i}"] for i in range(num_outputs)]


def registers_of(words: NDArray[Any]) -> Words:
    """Words of 16 bits, each beside another."""
    own = words.astype(np.uint32)
    return pair(own, np.roll(own, 1))


ALL_WORDS = np.arange(1 << 16, dtype=np.uint32)


@pytest.mark.parametrize("zero", range(17))
def test_codes_less_zero_points(zero: int) -> None:
    words, added = (
        registers_of(ALL_WORDS),
        np.broadcast_to(pair(*2 * [bf16(-128.0 - zero)]), ALL_WORDS.shape),
    )
    found = carried_out(code_pairs.LESS, 4, words, *4 * [added])
    for place, numbers in enumerate(found):
        expected = (ALL_WORDS >> np.uint32(4 * place) & np.uint32(15)).astype(np.float32) - zero
        low, high = parts(numbers)
        assert np.array_equal(low, expected) and np.array_equal(high, np.roll(expected, 1))


def test_small_floats() -> None:
    values = np.array(CODEBOOKS["e2m1"], np.float32)
    for place, numbers in enumerate(
        carried_out(code_pairs.SMALL_FLOATS, 4, registers_of(ALL_WORDS))
    ):
        expected = values[ALL_WORDS >> np.uint32(4 * place) & np.uint32(15)]
        low, high = parts(numbers)
        assert np.array_equal(low, expected) and np.array_equal(high, np.roll(expected, 1))
        assert np.array_equal(np.signbit(low), np.signbit(expected))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_planes_of_kv(name: str) -> None:
    """The lower and the upper codes of two words, as `_plane` makes them in the interpreter."""
    assembly = attention_load.INT8_PLANES if name == "int8" else attention_load.FP8_PLANES
    found = carried_out(assembly, 2, registers_of(ALL_WORDS))
    for place, numbers in enumerate(found):
        codes = (ALL_WORDS >> np.uint32(8 * place) & np.uint32(255)).astype(np.uint8)
        if name == "int8":
            expected = (codes.astype(np.float32) - 128) / 64
        else:
            fp8 = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
            expected = np.where(codes & 127 == 127, np.nan, fp8) * np.float32(2.0**-120)
        is_number = ~np.isnan(expected)  # the store has no code that is none
        low, high = parts(numbers)
        for got, want in ((low, expected), (np.roll(high, -1), expected)):
            got, want = got[is_number], want[is_number]
            assert np.array_equal(got, want)
            assert np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize(
    "codes",
    [CODES - 8, CODES - 16, CODES, np.array(CODEBOOKS["e2m1"])],
    ids=["signed", "less 16", "whole", "e2m1"],
)
def test_scaled_by_all_short_floats(codes: NDArray[Any]) -> None:
    """Of float16 all that are finite, rounded once: the bits of a product in float32 that is
    rounded to bf16.
    """
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    high, low = carried_out(code_pairs.TWO_PARTS, 2, halves.view(np.uint32))
    for code in codes.astype(np.float32):
        both = np.broadcast_to(pair(bf16(code), bf16(code)), high.shape)
        (found,) = carried_out(code_pairs.SCALED, 1, both, high, high, low, low)
        expected = bf16(code * halves)
        zero = (code == 0) | (halves == 0)  # whose sign says nothing
        assert (
            np.array_equal(found[~zero], pair(expected, expected)[~zero])
            and not (found[zero] & np.uint32(0x7FFF7FFF)).any()
        )


@pytest.mark.parametrize(
    "codes",
    [CODES - 8, CODES - 16, CODES, CODES - 128, np.array(CODEBOOKS["e2m1"])],
    ids=["signed", "less 16", "whole", "less 128", "e2m1"],
)
def test_scaled_by_all_bf16_numbers(codes: NDArray[Any]) -> None:
    """The bits of a product in float32 that is rounded to bf16."""
    scales = (ALL_WORDS << np.uint32(16)).view(np.float32)
    scales = scales[np.isfinite(scales) & (np.abs(scales) < 1e36)]
    (pairs,) = carried_out(code_pairs.UPPER_TWICE, 1, scales.view(np.uint32))
    for code in codes.astype(np.float32):
        both = np.broadcast_to(pair(bf16(code), bf16(-code)), scales.shape)
        (found,) = carried_out(code_pairs.SCALED_BY_BF16, 1, both, pairs, pairs)
        expected = pair(bf16(code * scales), bf16(-code * scales))
        zero = (code == 0) | (scales == 0)  # whose sign says nothing
        assert np.array_equal(found[~zero], expected[~zero])
        assert not (found[zero] & np.uint32(0x7FFF7FFF)).any()


@pytest.mark.parametrize("adds", [False, True])
def test_scaled_in_float32(adds: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2, 100_000)).astype(np.float32)
    scales = (rng.standard_normal(100_000).astype(np.float16) * np.float32(61)).astype(np.float32)
    minima = rng.standard_normal(100_000).astype(np.float32)
    assembly = code_pairs.SCALED_WITH_MINIMA if adds else code_pairs.SCALED_IN_FLOAT32
    words = [x.view(np.uint32) for x in (scales, scales, *((minima, minima) if adds else ()))]
    (found,) = carried_out(assembly, 1, pair(*bf16(codes)), *words)
    expected = bf16(codes * scales + minima if adds else codes * scales)
    assert np.array_equal(found, pair(*expected))


@pytest.mark.parametrize("offset", [0, 128])
def test_bytes(offset: int) -> None:
    less = np.full(ALL_WORDS.shape, 2**23 + 128 - offset, np.float32).view(np.uint32)
    found = carried_out(code_pairs.BYTES, 4, registers_of(ALL_WORDS), less, less)
    for place, numbers in enumerate(found):
        words = np.roll(ALL_WORDS, place % 2)
        codes = (words >> np.uint32(8 * (place // 2)) & np.uint32(255)).astype(np.float32)
        assert np.array_equal(numbers.view(np.float32), codes - 128 + offset)


def test_bytes_scaled_by_short_floats() -> None:
    rng = np.random.default_rng(0)
    scales = rng.integers(0, 0x7C00, ALL_WORDS.size).astype(np.uint16).view(np.float16)
    first = scales.astype(np.float32)
    second = np.roll(first, 7)
    words = [
        np.ascontiguousarray(x, np.float32).view(np.uint32)
        for one in (first, second)
        for x in (one, one, one * np.float32(-32896), one * np.float32(-32896))
    ]
    found = carried_out(code_pairs.SCALED_BYTES, 2, registers_of(ALL_WORDS), *words)
    for place, (numbers, scale) in enumerate(zip(found, (first, second), strict=True)):
        codes = (ALL_WORDS >> np.uint32(8 * place) & np.uint32(255)).astype(np.float32) - 128
        expected = pair(bf16(codes * scale), bf16(np.roll(codes, 1) * scale))
        zero = (parts(numbers)[0] == 0) | (parts(numbers)[1] == 0)  # its sign says nothing
        assert np.array_equal(numbers[~zero], expected[~zero])
        assert np.array_equal(parts(numbers)[0], parts(expected)[0])


@triton.jit
def plain_subtract_zero(words, first, second, third, fourth):
    low, second_code = words.to(tl.int32) & 15, words.to(tl.int32) >> 4 & 15
    third_code, high = words.to(tl.int32) >> 8 & 15, words.to(tl.int32) >> 12 & 15
    return (
        (128.0 + low.to(tl.float32) + first.to(tl.float32)).to(tl.bfloat16),
        (128.0 + second_code.to(tl.float32) + second.to(tl.float32)).to(tl.bfloat16),
        (128.0 + third_code.to(tl.float32) + third.to(tl.float32)).to(tl.bfloat16),
        (128.0 + high.to(tl.float32) + fourth.to(tl.float32)).to(tl.bfloat16),
    )


@triton.jit
def plain_small_float(code):
    return (
        ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    ).to(tl.bfloat16)


@triton.jit
def plain_small_floats(words):
    codes = words.to(tl.int32)
    return (
        plain_small_float(codes & 15),
        plain_small_float(codes >> 4 & 15),
        plain_small_float(codes >> 8 & 15),
        plain_small_float(codes >> 12 & 15),
    )


@triton.jit
def plain_scaled(codes, scale):
    return (codes.to(tl.float32) * scale).to(tl.bfloat16)


@triton.jit
def plain_scaled_in_float32(codes, scales, minima, ADDS: tl.constexpr):
    numbers = codes.to(tl.float32) * scales
    if ADDS:
        numbers += minima
    return numbers.to(tl.bfloat16)


@triton.jit
def plain_from_bytes(words, less):
    low, high = words.to(tl.int32) & 255, words.to(tl.int32) >> 8 & 255
    return 8388608.0 + low.to(tl.float32) - less, 8388608.0 + high.to(tl.float32) - less


@triton.jit
def plain_scaled_bytes(words, first, second):
    low, high = words.to(tl.int32) & 255, words.to(tl.int32) >> 8 & 255
    return (
        ((low.to(tl.float32) - 128) * first).to(tl.bfloat16),
        ((high.to(tl.float32) - 128) * second).to(tl.bfloat16),
    )


TWINS = {
    "subtract_zero": plain_subtract_zero,
    "small_floats": plain_small_floats,
    "scaled": plain_scaled,
    "scaled_by_bf16": plain_scaled,
    "scaled_in_float32": plain_scaled_in_float32,
    "from_bytes": plain_from_bytes,
    "scaled_bytes": plain_scaled_bytes,
}


@pytest.mark.skipif(not is_interpreting(), reason="the interpreter lacks the instructions")
@pytest.mark.parametrize("num_rows", [5, 70])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FORMAT_NAMES
        if decoder_of(layout_of(random_matrix(name, 4, 1, 1))) != "plain"
    ],
)
def test_a_gpu_multiplies_what_the_interpreter_does(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of product.py that only GPUs go, to the bit, with plain operations for the
    instructions.
    """
    stored = random_matrix(name, 40, 3, 1)
    weight, x = (
        pack([stored]),
        torch.randn(num_rows, stored.cols, generator=torch.Generator().manual_seed(0)).to(
            torch.bfloat16
        ),
    )
    usual, own = torch.empty(num_rows, 40), torch.empty(num_rows, 40)
    linear(usual, x, weight)()
    for twin, function in TWINS.items():
        monkeypatch.setattr(product, twin, function)
    monkeypatch.setattr(weight_format, "architecture", lambda: H100)
    launch = linear(own, x, weight)
    assert launch.constants["FORMAT"].decoder == decoder_of(weight.layout)
    launch()
    assert torch.equal(usual, own)
