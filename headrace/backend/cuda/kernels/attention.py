"""Attention of ragged rows over KV blocks: a persistent kernel computes partial results of
splits.

Programs take the items of a list that is made for each step (`attention_work.py`), so one launch
serves any batch. Every tile of keys begins at a multiple of its size. Keys that a row does not
see change no bit of its result, and neither does the number of rows of its tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.attention_tiles import Tiles, head_tiles, rows_per_tile
from headrace.backend.cuda.attention_work import FIELDS, NO_TREE, ROW_FIELDS
from headrace.backend.cuda.kernels.attention_bias import KeyBias, load_factors
from headrace.backend.cuda.kernels.attention_keys import attend, column_of
from headrace.backend.cuda.kernels.attention_load import load_queries
from headrace.backend.cuda.kernels.attention_merge import (
    clear_rows_without_work,
    finished,
    merge,
    merge_where_last,
)
from headrace.backend.cuda.kernels.hadamard import log_size, transform_heads
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.program.ops import Attention

_FIELDS = tl.constexpr(FIELDS)
_ROW_FIELDS = tl.constexpr(ROW_FIELDS)
_NO_TREE = tl.constexpr(NO_TREE)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sums(planes, sums, COLS: tl.constexpr):
    """Add the sums of all columns of queries to 16 equal columns."""
    ones = tl.full((COLS, 16), 1.0, tl.float32).to(planes[0].dtype)
    for i in tl.static_range(len(planes)):
        sums = tl.dot(planes[i], ones, sums)
    return sums


@triton.jit
def _attend_unit(
        unit, item, num_rows, q, q_stride, keys, key_scales, values, value_scales, rows, table,
    paths, slopes, plain_q, plain_stride, dims, biases, frequencies, waves,
    sums, weights, out, out_stride, sinks, scale, softcap,
        NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    TILE_HEADS: tl.constexpr, PATHS: tl.constexpr,
        KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_COLS: tl.constexpr,
    MORE_KEY_COLS: tl.constexpr, VALUE_COLS: tl.constexpr,
        BLOCK: tl.constexpr, FORMAT: tl.constexpr, HAS_PTX: tl.constexpr, IS_LATENT: tl.constexpr,
    MASKS_LATENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
        HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, FINISHES: tl.constexpr,
    WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAIRS: tl.constexpr, IS_TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the results of an item with a KV head, or with some of its query heads."""
    m = tl.arange(0, ROWS)
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    UNITS: tl.constexpr = KV_HEADS * HEAD_TILES
    kv_head = unit % UNITS // HEAD_TILES
    own_table, low, end = table + tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    begin, stop, ordinal = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    base, path = tl.load(item + 8), paths + tl.load(item + 9)
    in_group = unit % HEAD_TILES * TILE_HEADS + m % TILE_HEADS
    valid = (m // TILE_HEADS < num_rows) & (in_group < GROUP)
    row, head = (tl.load(item) + m // TILE_HEADS).to(tl.int64), kv_head * GROUP + in_group
    record = rows + row * _ROW_FIELDS
    index = tl.load(record + 2, valid, -1)  # the row's own, among the keys that it sees
    query = load_queries(q, row, q_stride, head, valid, 0, KEY_COLS, KEY_DIM, FORMAT)
    more_query, slope, at_start, at_quarter = query, index, index, index
    query_sum = index
    if PAIRS:
        at_start, at_quarter = load_factors(
            plain_q, row, plain_stride, head, valid, dims, biases, kv_head, KEY_DIM, PAIRS
        )
    if MORE_KEY_COLS:
        more_query = load_queries(
            q, row, q_stride, head, valid, KEY_COLS, MORE_KEY_COLS, KEY_DIM, FORMAT
        )
    if HAS_SLOPES:
        slope = tl.load(slopes + head, valid, 0.0) * _LOG2_E
    if FORMAT == "int8":
        sums_of_query = _sums(query, tl.zeros((ROWS, 16), tl.float32), KEY_COLS // 2)
        if MORE_KEY_COLS:
            sums_of_query = _sums(more_query, sums_of_query, MORE_KEY_COLS // 2)
        query_sum = column_of(sums_of_query, 0, False)

    first_key = end * 0  # of the keys in the window of a row of the tile
    if WINDOW:
        first_key = tl.maximum(low - (WINDOW - 1), 0)
    is_plain = base == _NO_TREE if PATHS == "trees" else PATHS == "none"
    if is_plain:
        total, weight_sum, most = attend(
            query, more_query, index, query_sum, slope, at_start, at_quarter,
            frequencies, waves,
            begin, stop, low, first_key, end, kv_head, own_table, base, path,
            keys, key_scales, values, value_scales, scale, softcap, False,
            KV_HEADS, KEY_DIM, VALUE_DIM, KEY_COLS, MORE_KEY_COLS, VALUE_COLS,
            BLOCK, FORMAT, HAS_PTX, IS_LATENT, MASKS_LATENT,
            HAS_SOFTCAP, HAS_SLOPES, WINDOW, SINK_TOKENS, SPLIT, ROWS, KEYS, PAIRS,
            IS_TURNED, STAGES,
        )  # fmt: skip
    else:
        total, weight_sum, most = attend(
            query, more_query, index, query_sum, slope, at_start, at_quarter,
            frequencies, waves,
            begin, stop, low, first_key, end, kv_head, own_table, base, path,
            keys, key_scales, values, value_scales, scale, softcap, True,
            KV_HEADS, KEY_DIM, VALUE_DIM, KEY_COLS, MORE_KEY_COLS, VALUE_COLS,
            BLOCK, FORMAT, HAS_PTX, IS_LATENT, MASKS_LATENT,
            HAS_SOFTCAP, HAS_SLOPES, WINDOW, SINK_TOKENS, SPLIT, ROWS, KEYS, PAIRS,
            IS_TURNED, 1,
        )  # fmt: skip
    return _store_results(
        total, weight_sum, most, record, ordinal, row, head, valid,
        sums, weights, out, out_stride, sinks,
        NUM_HEADS, VALUE_DIM, VALUE_COLS, HAS_SINKS, FINISHES,
    )  # fmt: skip


@triton.jit
def _store_results(
    total, weight_sum, most, record, ordinal, row, head, valid,
    sums, weights, out, out_stride, sinks,
        NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_COLS: tl.constexpr,
    HAS_SINKS: tl.constexpr, FINISHES: tl.constexpr,
):  # fmt: skip
    """Store the results of rows with one partial result, and the partial results of others; return
    whether there are any.
    """
    partials = tl.load(record + 1, valid, 0)
    is_partial = valid
    column = tl.arange(0, VALUE_COLS)[None, :]
    if FINISHES:
        is_partial = valid & (partials > 1)
        sink = weight_sum
        if HAS_SINKS:
            sink = tl.load(sinks + head, valid, 0.0)
        result = finished(total, weight_sum, most, sink, HAS_SINKS)
        place = out + (row * out_stride + head * VALUE_DIM)[:, None] + column
        is_finished = (valid & (partials == 1))[:, None] & (column < VALUE_DIM)
        tl.store(place, result.to(out.dtype.element_ty), is_finished)
    at = (tl.load(record, valid, 0) + ordinal).to(tl.int64) * NUM_HEADS + head
    place = sums + at[:, None] * VALUE_DIM + column
    tl.store(place, total, is_partial[:, None] & (column < VALUE_DIM))
    tl.store(weights + 2 * at, most, is_partial)
    tl.store(weights + 2 * at + 1, weight_sum, is_partial)
    return tl.max(partials) > 1


@triton.jit
def attention_kernel(
        q, q_stride, keys, key_scales, values, value_scales, items, count, rows, table, paths,
    slopes, plain_q, plain_stride, dims, biases, frequencies, waves,
    sums, weights, arrivals, out, out_stride, num_all_rows, sinks, scale, softcap,
        NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    TILE_HEADS: tl.constexpr, FEWEST: tl.constexpr, MOST: tl.constexpr, PATHS: tl.constexpr,
        KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_COLS: tl.constexpr,
    MORE_KEY_COLS: tl.constexpr, VALUE_COLS: tl.constexpr,
        BLOCK: tl.constexpr, FORMAT: tl.constexpr, HAS_PTX: tl.constexpr, IS_LATENT: tl.constexpr,
    MASKS_LATENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
        HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, FINISHES: tl.constexpr,
    WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAIRS: tl.constexpr, IS_TURNED: tl.constexpr, STAGES: tl.constexpr,
    MERGE_HEADS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Take every n-th unit of the list: an item with a KV head, or with some of its query heads.

    Another launch takes the items with fewer rows than `FEWEST`, or with more than `MOST`. `PATHS`
    says which items gather their keys one by one: "none", draft "trees", or "all".
    """
    UNITS: tl.constexpr = KV_HEADS * HEAD_TILES
    if FINISHES and FEWEST == 0:
        clear_rows_without_work(rows, num_all_rows, out, out_stride, NUM_HEADS * VALUE_DIM, 1024)
    is_partial = tl.program_id(0) < 0
    for unit in range(tl.program_id(0), tl.load(count) * UNITS, tl.num_programs(0)):
        item = items + unit // UNITS * _FIELDS
        num_rows = tl.load(item + 1)
        if FEWEST == 0 and MOST == _NO_TREE:  # noqa: SIM114 - known when compiled
            is_partial |= _attend_unit(
                unit, item, num_rows, q, q_stride, keys, key_scales, values, value_scales, rows,
                table, paths, slopes, plain_q, plain_stride, dims, biases, frequencies, waves,
                sums, weights, out, out_stride, sinks, scale, softcap,
                NUM_HEADS, KV_HEADS, HEAD_TILES, TILE_HEADS, PATHS,
                KEY_DIM, VALUE_DIM, KEY_COLS, MORE_KEY_COLS, VALUE_COLS,
                BLOCK, FORMAT, HAS_PTX, IS_LATENT, MASKS_LATENT, HAS_SOFTCAP, HAS_SLOPES,
                HAS_SINKS, FINISHES, WINDOW, SINK_TOKENS, SPLIT, ROWS, KEYS, PAIRS,
                IS_TURNED, STAGES,
            )  # fmt: skip
        elif (num_rows >= FEWEST) & (num_rows <= MOST):
            is_partial |= _attend_unit(
                unit, item, num_rows, q, q_stride, keys, key_scales, values, value_scales, rows,
                table, paths, slopes, plain_q, plain_stride, dims, biases, frequencies, waves,
                sums, weights, out, out_stride, sinks, scale, softcap,
                NUM_HEADS, KV_HEADS, HEAD_TILES, TILE_HEADS, PATHS,
                KEY_DIM, VALUE_DIM, KEY_COLS, MORE_KEY_COLS, VALUE_COLS,
                BLOCK, FORMAT, HAS_PTX, IS_LATENT, MASKS_LATENT, HAS_SOFTCAP, HAS_SLOPES,
                HAS_SINKS, FINISHES, WINDOW, SINK_TOKENS, SPLIT, ROWS, KEYS, PAIRS,
                IS_TURNED, STAGES,
            )  # fmt: skip
    if FINISHES and is_partial:
        merge_where_last(
            items, count, rows, arrivals, sums, weights, sinks, out, out_stride,
            FEWEST, MOST, NUM_HEADS, KV_HEADS, HEAD_TILES, TILE_HEADS, VALUE_DIM, HAS_SINKS,
            _FIELDS, ROWS, MERGE_HEADS, VALUE_COLS, AHEAD,
        )  # fmt: skip


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
    arrivals: Any  # [rows * heads] int32, zeros between launches
    queries: Any  # [rows, heads * key_dim], for stores that are rotated


def summed_dim(op: Attention, store: KvStore) -> int:
    """Numbers per value that are summed; for values inside rotated keys, whole Hadamard blocks."""
    if op.is_latent and store.uses_hadamard:
        return blocks(op.value_dim, 1 << log_size(op.head_dim)) << log_size(op.head_dim)
    return op.value_dim


def _key_columns(dim: int, least: int, fewest: int) -> tuple[int, int]:
    """Powers of two that the key columns are loaded in, of at least `fewest`, the first at least
    `least`: 576 is 512 and 64.
    """
    whole = power_of_2(dim, fewest)
    first, more = whole // 2, power_of_2(dim - whole // 2, fewest)
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
    has_trees: bool = True,
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
    partials = (scratch.sums, scratch.weights)
    args = (
        q,
        q.stride(0),
        *_words(store, op.layer),
        work.items,
        work.num_items,
        work.rows,
        work.table,
        work.paths,
        q if slopes is None else slopes,
        plain_q,
        plain_q.stride(0),
        *(key_bias or (q, q, q, q)),
        *partials,
        scratch.arrivals,
        out,
        out.stride(0),
        out.shape[0],
        q if sinks is None else sinks,
        scale * _LOG2_E.value,
        op.softcap * _LOG2_E.value,
    )
    constants = _constants(op, store) | {
        "HAS_SLOPES": slopes is not None,
        "HAS_SINKS": sinks is not None,
        "PAIRS": key_bias.dims.shape[1] if key_bias else 0,
    }
    fewest = 0
    for one in tiles.all:
        is_last = one is tiles
        most = NO_TREE if is_last else rows_per_tile(op, one)
        takes = _tile_constants(op, store, one) | {"FEWEST": fewest, "MOST": most}
        if takes["PATHS"] == "trees" and (fewest or not has_trees):
            takes["PATHS"] = "none"  # a row of a tree is an item, which the smallest tiles take
        launches.append(Launch(attention_kernel, (one.programs,), args, constants | takes))
        fewest = most + 1
    if store.uses_hadamard:
        turned_by = log_size(op.head_dim if op.is_latent else op.value_dim)
        dims = op.value_dim, summed_dim(op, store), turned_by
        launches.append(merge(out, work.rows, *partials, sinks, op.num_heads, *dims))
    return launches


def _words(store: KvStore, layer: int) -> list[Any]:
    """KV of a layer, with 8-bit codes in pairs, and with int8's two bf16 scales as one word."""
    keys, key_scales, values, value_scales = store.layer(layer)
    if store.format not in ("int8", "fp8"):
        return [keys, key_scales, values, value_scales]
    keys, values = keys.view(torch.uint16), values.view(torch.uint16)
    if store.value_scales is None:  # values are columns of keys
        value_scales = key_scales
    if store.format == "int8":
        key_scales, value_scales = key_scales.view(torch.int32), value_scales.view(torch.int32)
    return [keys, key_scales, values, value_scales]


def _constants(op: Attention, store: KvStore) -> dict[str, Any]:
    dim = summed_dim(op, store)
    # A product has at least 16 columns of a plane.
    fewest = 32 if store.format in ("int8", "fp8") else 16
    values = power_of_2(dim, fewest)
    columns, more = _key_columns(op.head_dim, values if op.is_latent else 0, fewest)
    return {
        "NUM_HEADS": op.num_heads,
        "KV_HEADS": op.num_kv_heads,
        "KEY_DIM": op.head_dim,
        "VALUE_DIM": dim,
        "KEY_COLS": columns,
        "MORE_KEY_COLS": more,
        "VALUE_COLS": columns if op.is_latent else values,
        "BLOCK": store.block_size,
        "FORMAT": store.format,
        "HAS_PTX": architecture().has_ptx,
        "IS_LATENT": op.is_latent,
        # else NaN stands after the columns that are values
        "MASKS_LATENT": store.format not in ("int8", "fp8") and dim == op.head_dim,
        "HAS_SOFTCAP": op.softcap > 0,
        "FINISHES": not store.uses_hadamard,
        "WINDOW": op.window,
        "SINK_TOKENS": op.num_sink_tokens if op.window else 0,
    }


def _tile_constants(op: Attention, store: KvStore, tiles: Tiles) -> dict[str, Any]:
    number, heads = head_tiles(op.num_heads, op.num_kv_heads, tiles)
    columns = power_of_2(op.value_dim, 16)
    return {
        "HEAD_TILES": number,
        "TILE_HEADS": heads,
        "PATHS": "all" if store.block_size % tiles.keys else "trees",
        "SPLIT": tiles.split,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "IS_TURNED": tiles.is_turned,
        "STAGES": tiles.num_stages,
        "MERGE_HEADS": power_of_2(heads),
        # Few rows may have long contexts, with many partial results.
        "AHEAD": max(1, min(16, 2048 * tiles.num_warps // (power_of_2(heads) * columns))),
        "num_warps": tiles.num_warps,
    }
