"""Sorts the rows of a step by expert or by adapter, so that each tile of a product has one
matrix.

A pair is a row and one of its choices, row * top_k + k. The pairs of an expert are adjacent and
ascending, and start at a tile. Positions only choose the tile that computes a pair. All sums are
of integers, so they do not depend on the partition.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch, blocks, power_of_2

_CHUNK = 1024


class Aligned(NamedTuple):
    """Pairs in tiles of `block_m`, each tile of one expert."""

    pairs: Any  # int32 [most tiles * block_m]; NONE fills up the last tile of each expert
    experts: Any  # int32 [most tiles] of each tile
    num_tiles: Any  # int32 [1]; beyond them nothing is written
    counts: Any  # int32 [chunks, experts]: working memory
    block_m: int

    @property
    def most_tiles(self) -> int:
        return len(self.experts)


NONE = -1
"""The pair of a place of a tile that has none."""


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Maximum number of tiles that `pairs` fill, for any routing."""
    return min(pairs, (pairs + experts * (block_m - 1)) // block_m)


def empty_aligned(rows: int, top_k: int, experts: int, block_m: int, device: Any) -> Aligned:
    """Allocate the memory of the tiles for a number of rows."""
    tiles = most_tiles(rows * top_k, experts, block_m)
    shapes = (
        (tiles * block_m,),
        (tiles,),
        (1,),
        (blocks(rows * top_k, _CHUNK), power_of_2(experts, 16)),
    )
    pairs, tile_experts, num_tiles, counts = (
        torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes
    )
    return Aligned(
        pairs=pairs, experts=tile_experts, num_tiles=num_tiles, counts=counts, block_m=block_m
    )


@triton.jit
def _experts_of(
    pair, numbers, stride, last_row, num_experts, TOP_K: tl.constexpr, FIRST: tl.constexpr
):
    """Experts of pairs from `first` on, and whether each pair takes part; 0 if it does not."""
    row = pair // TOP_K
    takes_part = row < last_row
    expert = (
        tl.load(numbers + row.to(tl.int64) * stride + pair % TOP_K, takes_part, FIRST).to(tl.int32)
        - FIRST
    )
    takes_part = takes_part & (expert >= 0) & (expert < num_experts)
    return tl.where(takes_part, expert, 0), takes_part


@triton.jit(do_not_specialize=["rows", "num_experts"])
def count_experts_kernel(
    counts,
    numbers,
    stride,
    num_rows,
    rows,
    num_experts,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the pairs of one chunk by expert."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert, takes_part = _experts_of(
        pair, numbers, stride, tl.minimum(tl.load(num_rows), rows), num_experts, TOP_K, FIRST
    )
    tl.store(
        counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS),
        tl.histogram(expert, EXPERTS, takes_part),
    )


@triton.jit
def _rank(
    expert,
    numbers,
    stride,
    last_row,
    num_experts,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Number of earlier pairs of the chunk with the same expert."""
    start = tl.program_id(0) * CHUNK
    rank = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, STEP):
        other = first + tl.arange(0, STEP)[None, :]
        to, takes_part = _experts_of(
            start + other, numbers, stride, last_row, num_experts, TOP_K, FIRST
        )
        comes_before = takes_part & (to == expert[:, None]) & (other < tl.arange(0, CHUNK)[:, None])
        rank += tl.sum(comes_before.to(tl.int32), 1)
    return rank


@triton.jit
def _fill_tiles(
    pairs,
    tile_experts,
    total,
    ends,
    first,
    last,
    NAME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the experts of some tiles, numbered from NAME on, and their padding."""
    place = tl.arange(0, BLOCK_M)[None, :]
    for start in range(first, last, STEP):
        tile = start + tl.arange(0, STEP)
        is_tile = tile < last
        expert = tl.where(is_tile, tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1), 0)
        tl.store(tile_experts + tile, expert + NAME, is_tile)
        # Pairs of the expert that lie in this tile or behind it: its tiles end at `ends`.
        tiles_of_expert = (tl.gather(total, expert, 0) + BLOCK_M - 1) // BLOCK_M
        left = (
            tl.gather(total, expert, 0)
            - (tile - tl.gather(ends, expert, 0) + tiles_of_expert) * BLOCK_M
        )
        tl.store(
            pairs + tile[:, None] * BLOCK_M + place, -1, is_tile[:, None] & (place >= left[:, None])
        )


@triton.jit(do_not_specialize=["rows", "num_experts", "chunks", "tiles_each"])
def align_experts_kernel(
    pairs,
    tile_experts,
    num_tiles,
    loads,  # None: they are not kept
    counts,
    numbers,
    stride,
    num_rows,
    rows,
    num_experts,
    chunks,
    tiles_each,  # of the tiles there may be, those that a program fills
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    NAME: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    # whether there are counts of chunks: of a single one the program counts itself
    COUNTED: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Put the pairs of one chunk in their places, and fill some of the tiles."""
    chunk = tl.program_id(0)
    pair, bin = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    last_row = tl.minimum(tl.load(num_rows), rows)
    expert, takes_part = _experts_of(pair, numbers, stride, last_row, num_experts, TOP_K, FIRST)
    before = tl.zeros([EXPERTS], tl.int32)
    if COUNTED:
        total = tl.zeros([EXPERTS], tl.int32)
        for first in range(0, chunks, 16):
            some = first + tl.arange(0, 16)[:, None]
            count = tl.load(counts + some * EXPERTS + bin[None, :], some < chunks, 0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(some < chunk, count, 0), 0)
    else:
        total = tl.histogram(expert, EXPERTS, takes_part)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    start = tl.gather((ends - tiles) * BLOCK_M + before, expert, 0)
    rank = _rank(expert, numbers, stride, last_row, num_experts, TOP_K, FIRST, CHUNK, STEP)
    tl.store(pairs + start + rank, pair, takes_part)
    all_tiles = tl.sum(tiles, 0)
    last = tl.minimum((chunk + 1) * tiles_each, all_tiles)
    _fill_tiles(pairs, tile_experts, total, ends, chunk * tiles_each, last, NAME, BLOCK_M, STEP)
    if chunk == 0:
        tl.store(num_tiles, all_tiles)
        if loads is not None:
            tl.store(
                loads + bin,
                tl.load(loads + bin, bin < num_experts, 0) + total.to(tl.int64),
                bin < num_experts,
            )


def _align(
    to: Aligned,
    numbers: Any,
    top_k: int,
    first: int,
    num_experts: int,
    num_rows: Any,
    loads: Any | None,
    name: int,
) -> list[Launch]:
    rows, num_chunks = len(numbers), len(to.counts)
    chunk = min(_CHUNK, power_of_2(rows * top_k, 16))
    source = (numbers, numbers.stride(0), num_rows, rows, num_experts)
    constants = {
        "TOP_K": top_k,
        "FIRST": first,
        "EXPERTS": to.counts.shape[1],
        "CHUNK": chunk,
        "num_warps": min(8, max(4, chunk // 64)),
    }
    counted = (
        [Launch(count_experts_kernel, (num_chunks,), (to.counts, *source), constants)]
        if num_chunks > 1
        else []
    )
    args = (
        to.pairs,
        to.experts,
        to.num_tiles,
        loads,
        to.counts,
        *source,
        num_chunks,
        blocks(to.most_tiles, num_chunks),
    )
    constants = constants | {
        **{"NAME": name, "BLOCK_M": to.block_m, "COUNTED": num_chunks > 1, "STEP": 16}
    }
    return [*counted, Launch(align_experts_kernel, (num_chunks,), args, constants)]


def align_experts(
    to: Aligned, routing: Any, num_rows: Any, loads: Any, first: int = 0
) -> list[Launch]:
    """Sort the pairs of the first rows into tiles, and add the number of each expert to `loads`.

    Experts from `first` on take part, as many as there are loads; tiles number them from 0.
    `routing` is float32 [rows, 2 * top_k]; its first half are expert numbers. `num_rows` is int32
    [1], `loads` int64 [experts]. `to` is memory for as many rows as `routing` has.
    """
    return _align(to, routing, routing.shape[1] // 2, first, len(loads), num_rows, loads, 0)


def align_adapters(to: Aligned, adapters: Any, slots: int, num_rows: Any) -> list[Launch]:
    """Sort rows into tiles of one adapter each; rows without an adapter get tiles with number -1.

    `adapters` is int32 [rows] with numbers below `slots`; `to` is memory for these rows, with one
    choice of `slots + 1`.
    """
    return _align(to, adapters[:, None], 1, -1, slots + 1, num_rows, None, -1)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    out,
    rows,
    out_stride,
    y,
    y_stride,
    routing,
    routing_stride,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(routing + row * routing_stride + TOP_K + k, mask)
        total += weight * tl.load(y + (row * TOP_K + k) * y_stride + column, mask)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask)


def combine(out: Any, y: Any, routing: Any) -> Launch:
    """Compute out[t] = sum over k, in ascending order, of weight[t, k] * y[t * top_k + k].

    `y` is float32 [rows * top_k, width].
    """
    return flat(
        combine_kernel, out, y, y.stride(0), routing, routing.stride(0), TOP_K=routing.shape[1] // 2
    )
