"""Kernels that measure a GPU: read memory, or multiply and add."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch

READ_BLOCK = 4096
_READS = 4
"""Blocks that a program reads."""


@triton.jit
def read_memory(x, out, BLOCK: tl.constexpr, READS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * READS)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(READS):
        total += tl.load(x + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read(x: Any, out: Any, block: int = READ_BLOCK) -> Launch:
    """Read `x` float32 once; its size is a multiple of 4 blocks, and `out` gets a number per 4."""
    return Launch(
        read_memory,
        (x.numel() // (block * _READS),),
        (x, out),
        {"BLOCK": block, "READS": _READS, "num_warps": 8},
    )


@triton.jit
def multiply_tiles(a, b, out, rounds, TILE: tl.constexpr, PART: tl.constexpr, ACC: tl.constexpr):
    m, n, k = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, PART)
    x, y = tl.load(a + m[:, None] * PART + k[None, :]), tl.load(b + k[:, None] + n[None, :] * PART)
    acc = tl.zeros((TILE, TILE), ACC)
    for _ in range(rounds):
        acc = tl.dot(x, y, acc, out_dtype=ACC)
    tl.store(out + tl.program_id(0) * TILE + n, tl.sum(acc, 0))


def multiply(a: Any, b: Any, out: Any, rounds: int, programs: int) -> Launch:
    """Multiply `a` [tile, part] with `b` [tile, part] transposed, `rounds` times; `out` [programs
    * tile].
    """
    tile, part = a.shape
    acc = tl.int32 if out.dtype.is_floating_point is False else tl.float32
    return Launch(
        multiply_tiles,
        (programs,),
        (a, b, out, rounds),
        {"TILE": tile, "PART": part, "ACC": acc, "num_warps": 8 if tile >= 128 else 4},
    )


@triton.jit
def multiply_numbers(x, rounds, BLOCK: tl.constexpr):
    at = x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(at)
    total = factor
    for _ in range(rounds):
        total = tl.fma(total, factor, factor)
    tl.store(at, total)


def multiply_add(x: Any, rounds: int, block: int = READ_BLOCK) -> Launch:
    """Multiply and add float32 numbers without tensor cores."""
    return Launch(
        multiply_numbers, (x.numel() // block,), (x, rounds), {"BLOCK": block, "num_warps": 8}
    )
