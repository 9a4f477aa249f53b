"""Attention of ragged rows over KV blocks: a persistent kernel computes partial results of
splits.

Programs take the items of a list that is made for each step (`attention_work.py`), so one launch
serves any batch. Every tile of keys begins at a multiple of its size. Keys that a row does not
see change no bit of its result.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from headrace._native import GpuWork
from headrace.backend.cuda.attention_work import FIELDS, ROW_FIELDS
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.attention_merge import factors, merge
from headrace.backend.cuda.kernels.attention_split import (
    attend_split,
    count_of,
    load_factors,
    load_queries,
    nth,
)
from headrace.backend.cuda.kernels.hadamard import log_size, transform_heads
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.program.kv import KvGroup
from headrace.program.ops import Attention

_FIELDS = tl.constexpr(FIELDS)
_ROW_FIELDS = tl.constexpr(ROW_FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
        q, q_stride, keys, key_scales, values, value_scales, items, count, rows, table, paths,
    slopes, plain_q, plain_stride, dims, biases, frequencies, waves,
    sums, weights, scale, softcap,
        NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
        KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_COLS: tl.constexpr,
    MORE_KEY_COLS: tl.constexpr, VALUE_COLS: tl.constexpr,
        BLOCK: tl.constexpr, FORMAT: tl.constexpr, IS_LATENT: tl.constexpr,
    MASKS_LATENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
        HAS_SLOPES: tl.constexpr, WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Take every n-th unit of the list: an item with a KV head, or with some of its query heads."""
    m = tl.arange(0, ROWS)
    value_column, one_column = tl.arange(0, VALUE_COLS)[None, :], tl.arange(0, 16)[None, :]
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    UNITS: tl.constexpr = KV_HEADS * HEAD_TILES
    for unit in range(tl.program_id(0), tl.load(count) * UNITS, tl.num_programs(0)):
        item, kv_head = items + unit // UNITS * _FIELDS, unit % UNITS // HEAD_TILES
        own_table, low, end = table + tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        begin, stop, ordinal = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
        base, path = tl.load(item + 8), paths + tl.load(item + 9)
        in_group = unit % HEAD_TILES * TILE_HEADS + m % TILE_HEADS
        valid = (m // TILE_HEADS < tl.load(item + 1)) & (in_group < GROUP)
        row, head = (tl.load(item) + m // TILE_HEADS).to(tl.int64), kv_head * GROUP + in_group
        index = tl.load(
            rows + row * _ROW_FIELDS + 2, valid, -1
        )  # the row's own, among the keys that it sees
        query = load_queries(q, row, q_stride, head, valid, tl.arange(0, KEY_COLS), KEY_DIM, FORMAT)
        more_query, slope, at_start, at_quarter = query, index, index, index
        if PAIRS:
            at_start, at_quarter = load_factors(
                plain_q, row, plain_stride, head, valid, dims, biases, kv_head, KEY_DIM, PAIRS
            )
        if MORE_KEY_COLS:
            more_query = load_queries(
                q,
                row,
                q_stride,
                head,
                valid,
                KEY_COLS + tl.arange(0, MORE_KEY_COLS),
                KEY_DIM,
                FORMAT,
            )
        if HAS_SLOPES:
            slope = tl.load(slopes + head, valid, 0.0) * _LOG2_E

        first_key = (
            tl.maximum(low - (WINDOW - 1), 0) if WINDOW else low * 0
        )  # of those in the window of a row of the tile
        sink_splits = tl.minimum((SINK_TOKENS + SPLIT - 1) // SPLIT, first_key // SPLIT)
        total, total_weight = (
            tl.zeros((ROWS, VALUE_COLS), tl.float32),
            tl.zeros((ROWS, 16), tl.float32),
        )
        total_most = tl.full((ROWS,), float("-inf"), tl.float32)
        for i in range(0, count_of(begin, stop, sink_splits, first_key // SPLIT)):
            acc, weight, most = attend_split(
                                query, more_query, index, slope, at_start, at_quarter,
                frequencies, waves, nth(i, begin, sink_splits,
                first_key // SPLIT), first_key, end, kv_head, own_table,
                base, path, keys, key_scales, values, value_scales, scale, softcap,
                                KV_HEADS, KEY_DIM, VALUE_DIM, KEY_COLS, MORE_KEY_COLS, VALUE_COLS,
                BLOCK, FORMAT, IS_LATENT, MASKS_LATENT,
                HAS_SOFTCAP, HAS_SLOPES, WINDOW, SINK_TOKENS, SPLIT, ROWS, KEYS, PAIRS,
            )  # fmt: skip
            total_most, before, now = factors(total_most, most)
            total = total * before[:, None] + acc * now[:, None]
            total_weight = total_weight * before[:, None] + weight * now[:, None]

        partial = tl.load(rows + row * _ROW_FIELDS, valid, 0) + ordinal
        out = partial.to(tl.int64) * NUM_HEADS + head
        tl.store(
            sums + out[:, None] * VALUE_DIM + value_column,
            total,
            valid[:, None] & (value_column < VALUE_DIM),
        )
        tl.store(weights + 2 * out, total_most, valid)
        tl.store(
            weights + (2 * out + 1)[:, None] + one_column,
            total_weight,
            valid[:, None] & (one_column == 0),
        )


class Tiles(NamedTuple):
    """Sizes of the tiles. `keys` and `split` decide bits and are equal for all launches over a
    store.

    On Hopper all `rows` are multiples of 64: smaller tiles would take another instruction, which
    may round sums differently.
    """

    rows: int  # queries, those of the batch times heads
    keys: int
    split: int
    programs: int
    num_warps: int
    num_stages: int


class KeyBias(NamedTuple):
    """The pairs of a key bias on the device, with zeros up to one number of pairs for each KV
    head. Their number is a power of two, at least 8.
    """

    dims: Any  # [KV heads, pairs] first of the two numbers, int32
    biases: Any  # [KV heads, pairs, 2] float32
    frequencies: Any  # [KV heads, pairs] radians for each position, float64
    waves: Any  # [KV heads, cosines and sines, split] of positions from the start of a split

    @classmethod
    def of(cls, op: Attention, bias: NDArray[np.float32], split: int) -> "KeyBias":
        """`bias`: [KV heads * head_dim]."""
        heads = [op.key_bias_pairs(head) for head in bias.reshape(op.num_kv_heads, op.head_dim)]
        num_pairs = power_of_2(max(map(len, heads)), 8)
        pairs = np.zeros((len(heads), num_pairs, 4))
        for row, head in zip(pairs, heads, strict=True):
            row[: len(head)] = np.array(head).reshape(-1, 4)
        angles = pairs[:, :, 1, None] * np.arange(split)
        parts = {
            torch.int32: pairs[:, :, 0],
            torch.float32: pairs[:, :, 2:],
            torch.float64: pairs[:, :, 1],
        }
        dims, biases, frequencies = (
            torch.tensor(part, dtype=dtype, device=DEVICE) for dtype, part in parts.items()
        )
        waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return cls(
            dims, biases, frequencies, torch.tensor(waves, dtype=torch.float32, device=DEVICE)
        )


class AttentionWork(NamedTuple):
    """Attention work of a step for a group of layers, int32 on the device: `WorkArrays` and block
    tables.
    """

    items: Any  # [at most `partials`, FIELDS]
    num_items: Any  # [1]
    rows: Any  # [rows, ROW_FIELDS]
    table: Any  # of all sequences, at the offsets that items have
    paths: Any


class Scratch(NamedTuple):
    """Partial results in float32, in memory that all layers share."""

    sums: Any  # [partials * heads * summed_dim]
    weights: Any  # [partials * heads * 2] the largest score times log2 e, and the sum of weights
    queries: Any  # [rows, heads * key_dim], for stores that are rotated


def tiles_for(group: KvGroup, num_rows: int, multiprocessors: int, dtype: str) -> Tiles:
    """Choose tiles by the rows of the step and the multiprocessors of the GPU."""
    wide = max(group.layout.key_dim, group.layout.value_dim) > 128
    if dtype == "f32":  # without tensor cores
        return Tiles(
            rows=32, keys=32, split=512, programs=2 * multiprocessors, num_warps=8, num_stages=2
        )
    if wide:
        return Tiles(
            rows=64, keys=32, split=512, programs=multiprocessors, num_warps=8, num_stages=2
        )
    if max(group.layout.key_dim, group.layout.value_dim) <= 64:
        return Tiles(
            rows=64, keys=64, split=512, programs=2 * multiprocessors, num_warps=4, num_stages=3
        )
    return Tiles(
        rows=64, keys=64, split=512, programs=multiprocessors, num_warps=8, num_stages=3
    )  # what larger tiles or fewer warps keep does not fit into registers


def head_tiles(num_heads: int, num_kv_heads: int, tiles: Tiles) -> tuple[int, int]:
    """Number of tiles for the query heads of a KV head, and the heads per tile."""
    group = num_heads // num_kv_heads
    number = blocks(group, tiles.rows)
    return number, blocks(group, number)


def work_of(op: Attention, tiles: Tiles) -> GpuWork:
    """Return the builder of this op's work; ops of a layer group with equal heads share it."""
    number, heads = head_tiles(op.num_heads, op.num_kv_heads, tiles)
    num_sink_tokens = op.num_sink_tokens if op.window else 0
    return GpuWork(
        tiles.rows // heads,
        op.num_kv_heads * number,
        tiles.programs,
        tiles.split,
        op.window,
        num_sink_tokens,
    )


def summed_dim(op: Attention, store: KvStore) -> int:
    """Numbers per value that are summed; for values inside rotated keys, whole Hadamard blocks."""
    if op.is_latent and store.uses_hadamard:
        return blocks(op.value_dim, 1 << log_size(op.head_dim)) << log_size(op.head_dim)
    return op.value_dim


def _key_columns(dim: int, least: int) -> tuple[int, int]:
    """Powers of two that the key columns are loaded in, the first at least `least`: 576 is 512
    and 64.
    """
    whole = power_of_2(dim, 16)
    first, more = whole // 2, power_of_2(dim - whole // 2, 16)
    return (first, more) if least <= first and more < first else (whole, 0)


def attention(
    op: Attention,
    q: Any,
    out: Any,
    store: KvStore,
    work: AttentionWork,
    scratch: Scratch,
    tiles: Tiles,
    slopes: Any = None,
    sinks: Any = None,
    key_bias: KeyBias | None = None,
) -> list[Launch]:
    """Compute attention of `q` [rows, heads * head_dim], float32, into `out` [rows, heads *
    value_dim].

    `out` is float32 or bf16, with zeros in padding rows; `slopes` and `sinks` [heads] are
    float32. Queries are rotated here if the store is.
    """
    launches: list[Launch] = []
    plain_q = q
    if store.uses_hadamard:
        launches.append(transform_heads(scratch.queries, q, op.head_dim))
        q = scratch.queries
    # Scores come times log2 e, for powers of two; those under a cap come first as what the tangent
    # is made of.
    scale = 2 * op.scale / op.softcap if op.softcap else op.scale
    partials, dim = (scratch.sums, scratch.weights), summed_dim(op, store)
    lists = (
        work.items,
        work.num_items,
        work.rows,
        work.table,
        work.paths,
        q if slopes is None else slopes,
    )
    args = (
        q,
        q.stride(0),
        *store.layer(op.layer),
        *lists,
        plain_q,
        plain_q.stride(0),
        *(key_bias or (q, q, q, q)),
        *partials,
        scale * _LOG2_E.value,
        op.softcap * _LOG2_E.value,
    )
    launches.append(
        Launch(
            attention_kernel,
            (tiles.programs,),
            args,
            _constants(op, store, tiles, slopes is not None)
            | {"PAIRS": key_bias.dims.shape[1] if key_bias else 0},
        )
    )
    turned_by = (
        log_size(op.head_dim if op.is_latent else op.value_dim) if store.uses_hadamard else 0
    )
    launches.append(
        merge(out, work.rows, *partials, sinks, op.num_heads, op.value_dim, dim, turned_by)
    )
    return launches


def _constants(op: Attention, store: KvStore, tiles: Tiles, has_slopes: bool) -> dict[str, Any]:
    number, heads = head_tiles(op.num_heads, op.num_kv_heads, tiles)
    dim = summed_dim(op, store)
    columns, more = _key_columns(op.head_dim, power_of_2(dim, 16) if op.is_latent else 0)
    return {
        "NUM_HEADS": op.num_heads,
        "KV_HEADS": op.num_kv_heads,
        "HEAD_TILES": number,
        "TILE_HEADS": heads,
        "KEY_DIM": op.head_dim,
        "VALUE_DIM": dim,
        "KEY_COLS": columns,
        "MORE_KEY_COLS": more,
        "VALUE_COLS": columns if op.is_latent else power_of_2(dim, 16),
        "BLOCK": store.block_size,
        "FORMAT": store.format,
        "IS_LATENT": op.is_latent,
        "MASKS_LATENT": store.format in ("int8", "fp8")
        or dim == op.head_dim,  # else NaN stands behind what are values
        "HAS_SOFTCAP": op.softcap > 0,
        "HAS_SLOPES": has_slopes,
        "WINDOW": op.window,
        "SINK_TOKENS": op.num_sink_tokens if op.window else 0,
        "SPLIT": tiles.split,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
