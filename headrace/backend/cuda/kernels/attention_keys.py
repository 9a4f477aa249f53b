"""The loop of attention over tiles of keys: softmax with a running maximum, split by split."""

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.attention_bias import turned
from headrace.backend.cuda.kernels.attention_load import (
    FP8_HALF,
    block_place,
    load_scales,
    load_tile,
    path_places,
    sum_factor,
)
from headrace.backend.cuda.kernels.attention_merge import factors


@triton.jit
def _nth(i, begin, num_sinks, window):
    """Number i of the integers from `begin` on that are below `num_sinks` or not below `window`."""
    first = tl.maximum(num_sinks - begin, 0)
    return tl.where(i < first, begin + i, tl.maximum(begin, window) + i - first)


@triton.jit
def _count_of(begin, stop, num_sinks, window):
    """Count the integers of `_nth` below `stop`."""
    return tl.maximum(tl.minimum(num_sinks, stop) - begin, 0) + tl.maximum(
        stop - tl.maximum(begin, window), 0
    )


@triton.jit
def _by_row(x, IS_TURNED: tl.constexpr):
    """Spread a number for each row over the keys of a tile, or over columns."""
    return x[None, :] if IS_TURNED else x[:, None]


@triton.jit
def _by_key(x, IS_TURNED: tl.constexpr):
    """Spread a number for each key over the rows of a tile."""
    return x[:, None] if IS_TURNED else x[None, :]


@triton.jit
def _product(x, y, acc, IS_TURNED: tl.constexpr):
    """Add `x @ y` to `acc`; all three are transposed if tiles are turned."""
    if IS_TURNED:
        return tl.dot(tl.trans(y), x, acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def _products(queries, keys, products, IS_TURNED: tl.constexpr):
    """Add products of the planes of queries and keys, one plane after the other."""
    for i in tl.static_range(len(keys)):
        products = _product(queries[i], tl.trans(keys[i]), products, IS_TURNED)
    return products


@triton.jit
def _capped(
    scores, distance, slope, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Cap scores, and lower them by distance; all of them are times log2 e."""
    if HAS_SOFTCAP:
        # A score under a cap comes times 2 log2 e over the cap. This is the tangent,
        # 1 - 2 / (exp(2 score / cap) + 1).
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * softcap
    if HAS_SLOPES:
        scores = scores - _by_row(slope, IS_TURNED) * distance.to(tl.float32)
    return scores


@triton.jit
def _weight_columns(step, least, KEYS: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """What weights are multiplied by to get their sum, and for int8 the sums of minima and steps:
    [KEYS, 16].
    """
    column = tl.arange(0, 16)[None, :]
    if FORMAT == "int8":
        rest = tl.where(column == 1, least[:, None], tl.where(column == 2, step[:, None], 0.0))
        return tl.where(column == 0, 1.0, rest).to(TYPE)
    else:
        return tl.full((KEYS, 16), 1.0, tl.float32).to(TYPE)


@triton.jit
def column_of(weight, number: tl.constexpr, IS_TURNED: tl.constexpr):
    """One of the 16 columns of a tile: exactly, as the others add zeros."""
    is_column = _by_row(tl.arange(0, 16), not IS_TURNED) == number
    return tl.sum(tl.where(is_column, weight, 0.0), axis=0 if IS_TURNED else 1)


@triton.jit
def _places(
    tile, index, seen, kv_head, table, base, path,
    GATHER: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Places of the keys of a tile in the store: a first one, and those after it."""
    if GATHER:
        return base * 0, path_places(index, seen, kv_head, table, base, path, KV_HEADS, BLOCK)
    else:
        return block_place(tile, kv_head, table, KV_HEADS, BLOCK, KEYS), tl.arange(0, KEYS)


@triton.jit
def _key_products(
    query, more_query, query_sum, keys, scales, first, at, seen, factor,
    KEY_DIM: tl.constexpr, KEY_COLS: tl.constexpr, MORE_KEY_COLS: tl.constexpr,
    FORMAT: tl.constexpr, HAS_PTX: tl.constexpr, SCORES: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """The first columns of a tile of keys, in planes, and the products of queries with all of its
    columns.

    Products with 8-bit codes come times their scales and a factor.
    """
    key = load_tile(keys, first, at, seen, 0, KEY_COLS, KEY_DIM, FORMAT, HAS_PTX, False)
    products = _products(query, key, tl.zeros(SCORES, tl.float32), IS_TURNED)
    if MORE_KEY_COLS:
        more_key = load_tile(
            keys, first, at, seen, KEY_COLS, MORE_KEY_COLS, KEY_DIM, FORMAT, HAS_PTX, False
        )
        products = _products(more_query, more_key, products, IS_TURNED)
    if FORMAT == "int8" or FORMAT == "fp8":
        products = _scaled(products, scales, first, at, seen, query_sum, factor, FORMAT, IS_TURNED)
    return key, products


@triton.jit
def _scaled(
    products, scales, first, at, seen, query_sum, factor,
    FORMAT: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Scale products with codes of keys, times a factor."""
    step, least = load_scales(scales, first, at, seen, True, FORMAT)
    step, least = step * factor, least * factor
    of_sum = _by_key(step * sum_factor(FORMAT), IS_TURNED)
    if FORMAT == "int8":
        addend = _by_row(query_sum, IS_TURNED) * _by_key(least + 128.0 * step, IS_TURNED)
        return tl.fma(products, tl.broadcast_to(of_sum, products.shape), addend)
    else:
        return products * of_sum


@triton.jit
def _masked(
    scores, distance, index, seen,
    WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Replace the scores of keys that a row does not see."""
    visible = (distance >= 0) & _by_key(seen, IS_TURNED)
    if WINDOW:
        is_sink = _by_key(index < SINK_TOKENS, IS_TURNED)
        visible = visible & ((distance < WINDOW) | is_sink)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _scores(
    products, scale, own_index, index, seen, needs_mask, slope, softcap, IS_SCALED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr, ROWS: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Scores of the keys that rows see; -inf for others. Small tiles are always masked."""
    distance = _by_row(own_index, IS_TURNED) - _by_key(index, IS_TURNED)
    scores = products if IS_SCALED else products * scale
    scores = _capped(scores, distance, slope, softcap, HAS_SOFTCAP, HAS_SLOPES, IS_TURNED)
    if WINDOW or ROWS <= 16:
        scores = _masked(scores, distance, index, seen, WINDOW, SINK_TOKENS, IS_TURNED)
    else:
        if needs_mask:
            scores = _masked(scores, distance, index, seen, WINDOW, SINK_TOKENS, IS_TURNED)
    return scores


@triton.jit
def _weights(scores, scale, most, IS_RAW: tl.constexpr, IS_TURNED: tl.constexpr):
    """Weights of keys, relative to the maximum score; `scale` is applied to raw scores here."""
    reference = _by_row(tl.where(most == float("-inf"), 0.0, most), IS_TURNED)
    if IS_RAW:
        return tl.exp2(tl.fma(scores, scale, -reference))
    else:
        return tl.exp2(scores - reference)


@triton.jit
def _summed(
    acc, weight, p, value, scales, first, at, seen,
    KEYS: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Add the weighted values of a tile to the planes of `acc`, and weights to `weight`."""
    step, least, of_values = p, p, p
    if FORMAT == "int8" or FORMAT == "fp8":
        step, least = load_scales(scales, first, at, seen, False, FORMAT)
        of_values = p * _by_key(step * FP8_HALF if FORMAT == "fp8" else step, IS_TURNED)
    columns = _weight_columns(step, least, KEYS, FORMAT, TYPE)
    weight = _product(p.to(TYPE), columns, weight, IS_TURNED)
    of_values, sums = of_values.to(TYPE), ()
    for i in tl.static_range(len(value)):
        sums += (_product(of_values, value[i], acc[i], IS_TURNED),)  # type: ignore[assignment]
    return sums, weight


@triton.jit
def _times(planes, factor):
    """Multiply all planes."""
    products = ()
    for i in tl.static_range(len(planes)):
        products += (planes[i] * factor,)  # type: ignore[assignment]
    return products


@triton.jit
def _empty(
    ROWS: tl.constexpr, COLS: tl.constexpr, PLANES: tl.constexpr, IS_TURNED: tl.constexpr
):  # fmt: skip
    """Empty sums of each plane and of weights, and maxima."""
    SUMS: tl.constexpr = [COLS // PLANES, ROWS] if IS_TURNED else [ROWS, COLS // PLANES]
    WEIGHTS: tl.constexpr = [16, ROWS] if IS_TURNED else [ROWS, 16]
    planes = ()
    for _ in tl.static_range(PLANES):
        planes += (tl.zeros(SUMS, tl.float32),)  # type: ignore[assignment]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    return planes, tl.zeros(WEIGHTS, tl.float32), most


@triton.jit
def _with_split(
    total, total_weight, total_most, acc, weight, most,
    FORMAT: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Add the sums of a split to the total of the splits before it."""
    middle = weight
    if FORMAT == "int8":
        middle = column_of(weight, 1, IS_TURNED) + 128.0 * column_of(weight, 2, IS_TURNED)
        middle = _by_row(middle, IS_TURNED)
    total_most, before, now = factors(total_most, most)
    before, now = _by_row(before, IS_TURNED), _by_row(now, IS_TURNED)
    # Factors are powers of two, so that fusing a product with the sum rounds nothing else.
    totals = ()
    for i in tl.static_range(len(acc)):
        part = acc[i] * sum_factor(FORMAT)
        if FORMAT == "int8":
            part = part + middle
        scaled = tl.fma(total[i], tl.broadcast_to(before, part.shape), part * now)
        totals += (scaled,)  # type: ignore[assignment]
    total_weight = tl.fma(total_weight, tl.broadcast_to(before, total_weight.shape), weight * now)
    return totals, total_weight, total_most


@triton.jit
def _joined(planes, IS_TURNED: tl.constexpr):
    """All columns of results, [rows, columns]."""
    first = tl.trans(planes[0]) if IS_TURNED else planes[0]
    if len(planes) == 1:
        return first
    else:
        second = tl.trans(planes[1]) if IS_TURNED else planes[1]
        return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def attend(
        query, more_query, own_index, query_sum, slope, at_start, at_quarter, frequencies, waves,
    begin, stop, low, first_key, end, kv_head, table, base, path,
    keys, key_scales, values, value_scales, scale, softcap,
        GATHER: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_COLS: tl.constexpr, MORE_KEY_COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    HAS_PTX: tl.constexpr, IS_LATENT: tl.constexpr, MASKS_LATENT: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAIRS: tl.constexpr, IS_TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum values and weights (16 columns) over the keys of splits, with the maximum score per row.

    A split begins with empty sums, which are added to the total after its last tile. Maxima are
    rounded up to integers, so that scaling to another maximum is exact. In tiles of few rows, keys
    and values are the first operands (turned), which have at least 16 rows (64 on Hopper).
    """
    IS_CODE: tl.constexpr = FORMAT == "int8" or FORMAT == "fp8"
    # Scores that need no other change are scaled with the subtraction of the maximum.
    IS_RAW: tl.constexpr = not (IS_CODE or HAS_SOFTCAP or HAS_SLOPES)
    IS_SCALED: tl.constexpr = IS_RAW or (IS_CODE and not PAIRS)
    TILES: tl.constexpr = SPLIT // KEYS
    window_tile = first_key // KEYS
    sink_tiles = tl.minimum((SINK_TOKENS + KEYS - 1) // KEYS, window_tile)
    first_tile, stop_tile = begin * TILES, tl.minimum(stop * TILES, (end + KEYS - 1) // KEYS)
    num_tiles = _count_of(first_tile, stop_tile, sink_tiles, window_tile)

    PLANES: tl.constexpr = 2 if IS_CODE else 1
    SCORES: tl.constexpr = [KEYS, ROWS] if IS_TURNED else [ROWS, KEYS]
    acc, weight, most = _empty(ROWS, VALUE_COLS, PLANES, IS_TURNED)
    total, total_weight, total_most = acc, weight, most
    TYPE: tl.constexpr = query[0].dtype
    if IS_TURNED:
        query, more_query = _transposed(query), _transposed(more_query)
    turned_split, bias_factors, one_tile = first_tile * 0 - 1, at_start, tl.arange(0, KEYS)
    if PAIRS:
        wave_rows = waves + (kv_head * 2 * PAIRS + tl.arange(0, 2 * PAIRS))[:, None] * SPLIT
    for i in tl.range(0, num_tiles, num_stages=STAGES):
        tile = _nth(i, first_tile, sink_tiles, window_tile)
        last_tile = _nth(i - 1, first_tile, sink_tiles, window_tile)
        index = tile * KEYS + one_tile
        seen = index < end  # by any row of the tile
        if WINDOW:
            seen = seen & ((index >= first_key) | (index < SINK_TOKENS))
        first, at = _places(
            tile, index, seen, kv_head, table, base, path, GATHER, KV_HEADS, BLOCK, KEYS
        )
        key, products = _key_products(
            query, more_query, query_sum, keys, key_scales, first, at, seen,
            1.0 if PAIRS else scale, KEY_DIM, KEY_COLS, MORE_KEY_COLS, FORMAT, HAS_PTX,
            SCORES, IS_TURNED,
        )  # fmt: skip
        if PAIRS:
            if tile // TILES != turned_split:
                turned_split = tile // TILES
                start = turned_split * SPLIT
                bias_factors = turned(at_start, at_quarter, start, frequencies, kv_head, PAIRS)
            wave = tl.load(wave_rows + (index % SPLIT)[None, :])
            bias = tl.trans(bias_factors) if IS_TURNED else bias_factors
            products = _product(bias, wave, products, IS_TURNED)
        scores = _scores(
            products, scale, own_index, index, seen, tile * KEYS + KEYS > low + 1, slope, softcap,
            IS_SCALED, HAS_SOFTCAP, HAS_SLOPES, WINDOW, SINK_TOKENS, ROWS, IS_TURNED,
        )  # fmt: skip

        # Sums of the last tile are complete here, after the products of this one.
        if (i > 0) & (tile // TILES != last_tile // TILES):
            total, total_weight, total_most = _with_split(
                total, total_weight, total_most, acc, weight, most, FORMAT, IS_TURNED
            )
            acc, weight, most = _empty(ROWS, VALUE_COLS, PLANES, IS_TURNED)
        tile_most = tl.max(scores, axis=0 if IS_TURNED else 1)
        most, faded, _ = factors(most, tl.ceil(tile_most * scale if IS_RAW else tile_most))
        faded = _by_row(faded, IS_TURNED)
        p = _weights(scores, scale, most, IS_RAW, IS_TURNED)
        if IS_LATENT:
            value = (_finite(key[0]),) if MASKS_LATENT else key
        else:
            value = load_tile(
                values, first, at, seen, 0, VALUE_COLS, VALUE_DIM, FORMAT, HAS_PTX, IS_TURNED
            )
        acc, weight = _summed(
            _times(acc, faded), weight * faded, p, value, value_scales, first, at, seen,
            KEYS, FORMAT, TYPE, IS_TURNED,
        )  # fmt: skip
    total, total_weight, total_most = _with_split(
        total, total_weight, total_most, acc, weight, most, FORMAT, IS_TURNED
    )
    sum_of_weights = column_of(total_weight, 0, IS_TURNED)
    return _joined(total, IS_TURNED), sum_of_weights, total_most


@triton.jit
def _transposed(planes):
    """Transpose all planes."""
    turned_planes = ()
    for i in tl.static_range(len(planes)):
        turned_planes += (tl.trans(planes[i]),)  # type: ignore[assignment]
    return turned_planes


@triton.jit
def _finite(key):
    """Replace NaN in values by zeros, because other rows of the tile may not see them."""
    numbers = key.to(tl.float32)
    return tl.where(numbers == numbers, numbers, 0.0).to(key.dtype)
