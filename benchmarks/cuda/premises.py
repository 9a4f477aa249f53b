"""What the design takes for granted of a GPU: bits of its tensor cores, and its bandwidths."""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.compile_kernels import compile_kernels
from headrace.backend.cuda.device import DEVICE, multiprocessors
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import Launch, blocks
from headrace.backend.cuda.stream import make_stream
from headrace.backend.cuda.timing import seconds

ROWS = (16, 32, 64, 128, 256)
_TILES = ((16, 64), (32, 64), (64, 64), (128, 64), (128, 128), (256, 64))
_READ = 4096


@triton.jit
def multiply_kernel(
    out,
    x,
    w,
    K,
    out_stride,
    WIDE: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a tile of x @ w.T with the weight as the second operand, or as the first one."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PART)
    sums = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, PART):
        rows = tl.load(x + m[:, None] * K + first + k[None, :])
        weights = tl.load(w + n[:, None] * K + first + k[None, :])
        if WIDE:
            rows, weights = rows.to(tl.float32), weights.to(tl.float32)
        else:
            rows, weights = rows.to(tl.bfloat16), weights.to(tl.bfloat16)
        if WEIGHT_FIRST:
            sums = tl.dot(weights, tl.trans(rows), sums, input_precision="tf32")
        else:
            sums = tl.dot(rows, tl.trans(weights), sums, input_precision="tf32")
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
    tl.store(out + m[:, None] * out_stride + n[None, :], sums)


def multiply(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, tile: tuple[int, int], weight_first: bool
) -> Launch:
    return Launch(
        multiply_kernel,
        (blocks(len(x), tile[0]), blocks(len(w), tile[1])),
        (out, x, w, x.shape[1], out.stride(0)),
        {
            "WIDE": w.dtype == torch.float16,
            "WEIGHT_FIRST": weight_first,
            "PART": 64,
            "BLOCK_M": tile[0],
            "BLOCK_N": tile[1],
            "num_warps": 4,
        },
    )


def equal_bits(size: int) -> Iterator[tuple[str, str]]:
    """Whether instructions of tensor cores sum alike: bf16, 8-bit codes, and float16 by TF32.

    Hopper takes `mma.sync` for tiles whose first operand has fewer than 64 rows, and `wgmma` for
    others. With the weight second, 8-bit codes and float16 then have other bits: products have it
    first.
    """
    for kind in (torch.bfloat16, torch.int8, torch.float16):
        x = torch.randn(256, size, device=DEVICE).to(torch.bfloat16)
        numbers = torch.randn(256, size, device=DEVICE)
        w = (20 * numbers).to(kind) if kind == torch.int8 else numbers.to(kind)
        orders = (False, True) if kind == torch.bfloat16 else (True,)
        tried = list(product(_TILES, orders))
        outs = [torch.empty(256, 256, device=DEVICE) for _ in tried]
        launches = [
            multiply(out, x, w, tile, first) for out, (tile, first) in zip(outs, tried, strict=True)
        ]
        compile_kernels(launches)
        for launch in launches:
            launch()
        for weight_first in orders:
            whole = outs[tried.index(((128, 64), weight_first))]
            wrong = [
                f"{tile[0]} x {tile[1]} ({(out != whole).float().mean():.0%})"
                for out, (tile, first) in zip(outs, tried, strict=True)
                if first == weight_first and not torch.equal(out, whole)
            ]
            order = "weights first" if weight_first else "weights second"
            yield (
                f"tensor cores: {str(kind)[6:]}, {order}, in every tile",
                f"other bits in tiles of {', '.join(wrong)}" if wrong else "",
            )


def small_numbers(size: int) -> Iterator[tuple[str, str]]:
    """Whether tensor cores keep bf16 numbers below the normal ones: fp8 KV has some."""
    codes = torch.randint(-127, 128, (256, size), device=DEVICE).float()
    x = torch.randint(-8, 9, (256, size), device=DEVICE).float()
    usual, small = (torch.empty(256, 256, device=DEVICE) for _ in range(2))
    for tile, first in product((_TILES[0], _TILES[3]), (False, True)):
        large_x, small_codes = (x * 2.0**60).to(torch.bfloat16), (codes * 2.0**-133)
        multiply(usual, x.to(torch.bfloat16), codes.to(torch.bfloat16), tile, first)()
        multiply(small, large_x, small_codes.to(torch.bfloat16), tile, first)()
        order = "second operand" if first else "first operand"
        is_kept = torch.equal(small * 2.0**73, usual)
        yield (
            f"tensor cores: small numbers, rows as {order}, tile {tile[0]} x {tile[1]}",
            "" if is_kept else "they are not kept",
        )


@triton.jit
def read_again_kernel(x, out, count, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Read `count` blocks ROUNDS times, each program with another one first."""
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROUNDS * count // tl.num_programs(0)):
        block = (tl.program_id(0) + i * tl.num_programs(0)) % count
        at = x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(at, cache_modifier=".cg")
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def cache_bandwidth(megabytes: int, rounds: int) -> list[float]:
    """Bytes per second that kernels read of memory that fits into the L2 cache."""
    count, programs = (megabytes << 20) // (4 * _READ), 4 * multiprocessors()
    again = 2 if is_interpreting() else 40
    x = torch.rand(count * _READ, device=DEVICE)
    constants = {"ROUNDS": again, "BLOCK": _READ, "num_warps": 8}
    out = torch.empty(programs, device=DEVICE)
    launch = Launch(read_again_kernel, (programs,), (x, out, count), constants)
    make_stream().run([launch])
    read = again * count // programs * programs * 4 * _READ
    return [read / t for t in seconds(launch, rounds, 3)]
