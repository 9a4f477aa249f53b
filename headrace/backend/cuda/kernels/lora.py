"""Products of low-rank adapters (LoRA, Hu et al. 2021): scale * x @ down.T @ up.T.

Rows are in tiles of one adapter each (`align_adapters`). Sums over columns are cut at multiples
of a constant, and sums over ranks run in sixteens up to the rank of the row's adapter. So no
other row and no other adapter affects the bits.
"""

import struct
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.align_experts import Aligned
from headrace.backend.cuda.launch import Launch, blocks
from headrace.program.adapter import LowRank

BLOCK_M = 16
"""Rows of a tile, in which `Aligned` has to have them."""
_BLOCK_R, _BLOCK_K, _BLOCK_N = 16, 128, 128
_SPLIT = 1024
"""Columns that one program sums up: with a single row, more programs fetch what would else wait for
itself.
"""


def stored(matrices: LowRank, device: Any) -> tuple[Any, Any]:
    """Convert `down` [rank, cols] and `up` [rows, rank] to bf16, padded to a rank of a multiple
    of 16.
    """
    fill = -len(matrices.down) % _BLOCK_R
    padded = np.pad(matrices.down, ((0, fill), (0, 0))), np.pad(matrices.up, ((0, 0), (0, fill)))
    down, up = (torch.from_numpy(matrix).to(device, torch.bfloat16) for matrix in padded)
    return down, up


def table_row(down: Any, up: Any, scale: float) -> list[int]:
    """Row of an adapter in a weight's int64 table [slots, 4]: two addresses, the rank, the
    scale's bits.

    The matrices come from `stored` and must stay allocated. An adapter without matrices for the
    weight has a row of zeros.
    """
    return [
        down.data_ptr(),
        up.data_ptr(),
        len(down),
        struct.unpack("q", struct.pack("d", scale))[0],
    ]


def hidden_shape(aligned: Aligned, cols: int, max_rank: int) -> tuple[int, int, int]:
    """Shape of the float32 memory between the two products."""
    return blocks(cols, _SPLIT), len(aligned.pairs), _BLOCK_R * blocks(max_rank, _BLOCK_R)


@triton.jit
def _dot(x, w, sum):
    """Compute sum + x @ w with w in bf16; a float32 x is split into three bf16 parts with all its
    bits.
    """
    if x.dtype == tl.bfloat16:
        sum = tl.dot(x, w, sum)
    else:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sum = tl.dot(low, w, sum)
        sum = tl.dot(middle, w, sum)
        sum = tl.dot(high, w, sum)
    return sum


@triton.jit
def _matrix(table, adapter, which: tl.constexpr):
    address = tl.load(table + 4 * adapter + which)
    # Of the pointer, and not of the number, the compiler goes by this, and loads 16 bytes at a
    # time.
    return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def lora_down_kernel(
    hidden,  # [splits, places, max_rank] float32
    x,
    rows,
    tile_adapters,
    num_tiles,
    table,
    x_stride,
    cols,
    places,
    max_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sum a split of the columns, for a tile of rows and some ranks."""
    tile, split = tl.program_id(0), tl.program_id(2)
    if tile >= tl.load(num_tiles):
        return
    adapter = tl.load(tile_adapters + tile).to(tl.int64)
    if adapter < 0:
        return
    rank = tl.load(table + 4 * adapter + 2).to(tl.int32)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    if tl.program_id(1) * BLOCK_R >= rank:
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    row = tl.load(rows + place)
    down = _matrix(table, adapter, 0)
    from_x = x + row.to(tl.int64) * x_stride
    sum = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, cols), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        v = tl.load(from_x + k[None, :], (row >= 0) & (k[None, :] < cols), 0.0)
        w = tl.load(down + r * cols + k[:, None], k[:, None] < cols, 0.0)
        sum = _dot(v, w, sum)
    tl.store(hidden + (split.to(tl.int64) * places + place) * max_rank + r, sum)


@triton.jit
def lora_up_kernel(
    delta,
    hidden,
    rows,
    tile_adapters,
    num_tiles,
    table,
    delta_stride,
    width,
    places,
    max_rank,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a tile of rows and a block of columns of the result."""
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    slot = tl.load(tile_adapters + tile).to(tl.int64)
    adapter = tl.maximum(slot, 0)
    rank = tl.multiple_of(tl.where(slot < 0, 0, tl.load(table + 4 * adapter + 2)).to(tl.int32), 16)
    scale = tl.load(table + 4 * adapter + 3).to(tl.float64, bitcast=True).to(tl.float32)
    up = _matrix(table, adapter, 1)
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    row = tl.load(rows + place)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        h = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in range(SPLITS):
            h += tl.load(hidden + (split * places.to(tl.int64) + place) * max_rank + r[None, :])
        w = tl.load(up + n.to(tl.int64) * rank + r[:, None], n < width, 0.0)
        sum = _dot(h * scale, w, sum)
    tl.store(delta + row.to(tl.int64) * delta_stride + n, sum, (row >= 0) & (n < width))


def lora(delta: Any, hidden: Any, x: Any, aligned: Aligned, table: Any) -> list[Launch]:
    """Compute delta[t] = scale * x[t] @ down.T @ up.T by the row's adapter; zeros if it has none
    here.

    `delta` is float32 [rows, width], `x` float32 or bf16 [rows, cols], `hidden` float32 memory of
    at least `hidden_shape`, `table` int64 [slots, 4] (`table_row`). Rows that are not in
    `aligned` stay unchanged.
    """
    splits = blocks(x.shape[1], _SPLIT)
    assert (
        aligned.block_m == BLOCK_M
        and len(hidden) >= splits
        and hidden.shape[1] == len(aligned.pairs)
    )
    tiles = (aligned.pairs, aligned.experts, aligned.num_tiles, table)
    places, max_rank = hidden.shape[1:]
    shared = {"BLOCK_M": BLOCK_M, "BLOCK_R": _BLOCK_R}
    return [
        Launch(
            lora_down_kernel,
            (aligned.most_tiles, blocks(max_rank, _BLOCK_R), splits),
            (hidden, x, *tiles, x.stride(0), x.shape[1], places, max_rank),
            {**shared, "BLOCK_K": _BLOCK_K, "SPLIT": _SPLIT, "num_warps": 2, "num_stages": 4},
        ),
        Launch(
            lora_up_kernel,
            (aligned.most_tiles, blocks(delta.shape[1], _BLOCK_N)),
            (delta, hidden, *tiles, delta.stride(0), delta.shape[1], places, max_rank),
            {**shared, "SPLITS": splits, "BLOCK_N": _BLOCK_N, "num_warps": 4, "num_stages": 3},
        ),
    ]
