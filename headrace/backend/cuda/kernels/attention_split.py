"""A split of the context of a tile of queries: its keys by tiles, and softmax over them with a
running maximum.
"""

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.attention_merge import factors


@triton.jit
def _load_keys(cache, scales, at, seen, column, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers of keys or values at the places `at`, as they are multiplied; zeros where they are
    not seen.
    """
    mask = seen[:, None] & (column < DIM)[None, :]
    codes = tl.load(cache + at[:, None] * DIM + column[None, :], mask, 0.0)
    if FORMAT == "fp8":
        scale = tl.load(scales + at, seen, 0.0)
        return (codes.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    elif FORMAT == "int8":
        least = tl.load(scales + 2 * at, seen, 0.0).to(tl.float32)
        step = tl.load(scales + 2 * at + 1, seen, 0.0).to(tl.float32)
        # A float of 2**23 with the code in its last bits: it takes fewer instructions than a
        # conversion.
        numbers = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return (numbers * step[:, None] + least[:, None]).to(tl.bfloat16)
    else:
        return codes


@triton.jit
def load_queries(q, row, stride, head, valid, column, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Queries in the type that keys are multiplied in."""
    mask = valid[:, None] & (column < DIM)[None, :]
    numbers = tl.load(q + (row * stride + head * DIM)[:, None] + column[None, :], mask, 0.0)
    return numbers if FORMAT == "f32" else numbers.to(tl.bfloat16)


@triton.jit
def nth(i, begin, num_sinks, window):
    """Number i of those from `begin` on that are below `num_sinks` or not below `window`."""
    first = tl.maximum(num_sinks - begin, 0)
    return tl.where(i < first, begin + i, tl.maximum(begin, window) + i - first)


@triton.jit
def count_of(begin, stop, num_sinks, window):
    """How many of these there are below `stop`."""
    return tl.maximum(tl.minimum(num_sinks, stop) - begin, 0) + tl.maximum(
        stop - tl.maximum(begin, window), 0
    )


@triton.jit
def _scores(
    products, distance, slope, scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):
    """Scores times log2 e, from the products of queries and keys that lie so far back; all factors
    have it in them.
    """
    scores = products * scale
    if (
        HAS_SOFTCAP
    ):  # `scale` is 2 log2 e over the cap: this is the tangent, 1 - 2 / (exp(2 score / cap) + 1)
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * softcap
    if HAS_SLOPES:
        scores = scores - slope[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def _places(index, seen, kv_head, table, base, path, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Where keys lie in the store, by their indices among those that a row sees: in a tree, those
    of the row's ancestors.
    """
    in_tree = seen & (index >= base)
    place = tl.where(in_tree, base + tl.load(path + (index - base), in_tree, 0), index)
    block = tl.load(table + place // BLOCK, seen, 0).to(tl.int64)
    return (block * KV_HEADS + kv_head) * BLOCK + place % BLOCK


@triton.jit
def attend_split(
        query, more_query, own_index, slope, split, first_key, end, kv_head, table, base, path,
    keys, key_scales, values, value_scales,
    scale, softcap,
        KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLS: tl.constexpr, MORE_KEY_COLS: tl.constexpr,
        VALUE_COLS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    IS_LATENT: tl.constexpr, MASKS_LATENT: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums of values and of weights (16 equal columns) over the keys of a split, and the largest
    score of each row.

    Sums of weights are products with ones, as those of values are: what is summed in which order
    has to do with no tile's number of rows.
    """
    sink_tiles = tl.minimum((SINK_TOKENS + KEYS - 1) // KEYS, first_key // KEYS)
    first_tile = split * (SPLIT // KEYS)
    last_tile = tl.minimum(first_tile + SPLIT // KEYS, (end + KEYS - 1) // KEYS)
    ones = tl.full((KEYS, 16), 1.0, tl.float32).to(query.dtype)
    acc = tl.zeros((ROWS, VALUE_COLS), tl.float32)
    weight = tl.zeros((ROWS, 16), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in range(0, count_of(first_tile, last_tile, sink_tiles, first_key // KEYS)):
        index = nth(i, first_tile, sink_tiles, first_key // KEYS) * KEYS + tl.arange(0, KEYS)
        seen = (index < end) & (
            (index >= first_key) | (index < SINK_TOKENS)
        )  # by any row of the tile
        at = _places(index, seen, kv_head, table, base, path, KV_HEADS, BLOCK)
        key = _load_keys(keys, key_scales, at, seen, tl.arange(0, KEY_COLS), KEY_DIM, FORMAT)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MORE_KEY_COLS:
            more_key = _load_keys(
                keys, key_scales, at, seen, KEY_COLS + tl.arange(0, MORE_KEY_COLS), KEY_DIM, FORMAT
            )
            products = tl.dot(more_query, tl.trans(more_key), products, input_precision="ieee")
        distance = own_index[:, None] - index[None, :]
        visible = seen[None, :] & (distance >= 0)
        if WINDOW:
            visible = visible & ((distance < WINDOW) | (index < SINK_TOKENS)[None, :])
        scores = _scores(products, distance, slope, scale, softcap, HAS_SOFTCAP, HAS_SLOPES)
        scores = tl.where(visible, scores, float("-inf"))
        new_most, faded, _ = factors(most, tl.max(scores, axis=1))
        p = tl.exp2(scores - tl.where(new_most == float("-inf"), 0.0, new_most)[:, None]).to(
            query.dtype
        )
        if IS_LATENT:
            value = _finite(key) if MASKS_LATENT else key
        else:
            value = _load_keys(
                values, value_scales, at, seen, tl.arange(0, VALUE_COLS), VALUE_DIM, FORMAT
            )
        acc = tl.dot(p, value, acc * faded[:, None], input_precision="ieee")
        weight = tl.dot(p, ones, weight * faded[:, None], input_precision="ieee")
        most = new_most
    return acc, weight, most


@triton.jit
def _finite(key):
    """Keys as values, with zeros for NaN, which other rows of the tile may not see."""
    numbers = key.to(tl.float32)
    return tl.where(numbers == numbers, numbers, 0.0).to(key.dtype)
