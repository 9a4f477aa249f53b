"""One split of the context for a tile of queries: keys by tiles, softmax with a running maximum."""

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.attention_merge import factors


@triton.jit
def _load_keys(cache, scales, at, seen, column, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Load keys or values at `at` in the type that is multiplied; zeros if they are not visible."""
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
    """Load queries in the type that keys are multiplied in."""
    mask = valid[:, None] & (column < DIM)[None, :]
    numbers = tl.load(q + (row * stride + head * DIM)[:, None] + column[None, :], mask, 0.0)
    if FORMAT == "f32":
        return numbers
    elif FORMAT == "f16":
        return numbers.to(tl.float16)
    else:
        return numbers.to(tl.bfloat16)


@triton.jit
def load_factors(
    q, row, stride, head, valid, dims, biases, kv_head, DIM: tl.constexpr, PAIRS: tl.constexpr
):
    """What the rotated pairs of a key bias add to the product of a query and the key at position 0,
    and at a quarter turn of each pair: [queries, 2 * PAIRS] each, the pairs twice.
    """
    pair = kv_head * PAIRS + tl.arange(0, 2 * PAIRS) % PAIRS
    dim, mask = tl.load(dims + pair), valid[:, None]
    x, y = tl.load(biases + 2 * pair)[None, :], tl.load(biases + 2 * pair + 1)[None, :]
    at = q + (row * stride + head * DIM)[:, None] + dim[None, :]
    even, odd = tl.load(at, mask, 0.0), tl.load(at + 1, mask, 0.0)
    return even * x + odd * y, odd * x - even * y


@triton.jit
def _turned(at_start, at_quarter, start, frequencies, kv_head, PAIRS: tl.constexpr):
    """The factors of cosines, then of sines, of positions counted from `start`."""
    wave = tl.arange(0, 2 * PAIRS)
    angle = start.to(tl.float64) * tl.load(frequencies + kv_head * PAIRS + wave % PAIRS)
    cos, sin = tl.cos(angle).to(tl.float32)[None, :], tl.sin(angle).to(tl.float32)[None, :]
    of_cosines, of_sines = at_start * cos + at_quarter * sin, at_quarter * cos - at_start * sin
    return tl.where((wave < PAIRS)[None, :], of_cosines, of_sines)


@triton.jit
def nth(i, begin, num_sinks, window):
    """Number i of the integers from `begin` on that are below `num_sinks` or not below `window`."""
    first = tl.maximum(num_sinks - begin, 0)
    return tl.where(i < first, begin + i, tl.maximum(begin, window) + i - first)


@triton.jit
def count_of(begin, stop, num_sinks, window):
    """Count the integers of `nth` below `stop`."""
    return tl.maximum(tl.minimum(num_sinks, stop) - begin, 0) + tl.maximum(
        stop - tl.maximum(begin, window), 0
    )


@triton.jit
def _scores(
    products, distance, slope, scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):
    """Turn products into scores times log2 e; all factors include it."""
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
    """Places of keys in the store, by index among the visible keys: for a tree, the row's
    ancestors.
    """
    in_tree = seen & (index >= base)
    place = tl.where(in_tree, base + tl.load(path + (index - base), in_tree, 0), index)
    block = tl.load(table + place // BLOCK, seen, 0).to(tl.int64)
    return (block * KV_HEADS + kv_head) * BLOCK + place % BLOCK


@triton.jit
def attend_split(
        query, more_query, own_index, slope, at_start, at_quarter, frequencies, waves,
    split, first_key, end, kv_head, table, base, path,
    keys, key_scales, values, value_scales,
    scale, softcap,
        KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLS: tl.constexpr, MORE_KEY_COLS: tl.constexpr,
        VALUE_COLS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    IS_LATENT: tl.constexpr, MASKS_LATENT: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Sum values and weights (16 equal columns) over the keys of a split, with the maximum score
    per row.

    Sums of weights are products with ones, like the sums of values, so that their order does not
    depend on the number of rows of a tile.
    """
    sink_tiles = tl.minimum((SINK_TOKENS + KEYS - 1) // KEYS, first_key // KEYS)
    first_tile = split * (SPLIT // KEYS)
    last_tile = tl.minimum(first_tile + SPLIT // KEYS, (end + KEYS - 1) // KEYS)
    ones = tl.full((KEYS, 16), 1.0, tl.float32).to(query.dtype)
    acc = tl.zeros((ROWS, VALUE_COLS), tl.float32)
    weight = tl.zeros((ROWS, 16), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    if PAIRS:
        factors_here = _turned(at_start, at_quarter, split * SPLIT, frequencies, kv_head, PAIRS)
        wave_rows = waves + (kv_head * 2 * PAIRS + tl.arange(0, 2 * PAIRS))[:, None] * SPLIT
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
        if PAIRS:
            wave = tl.load(wave_rows + (index - split * SPLIT)[None, :])
            products = tl.dot(factors_here, wave, products, input_precision="ieee")
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
    """Replace NaN in values by zeros, because other rows of the tile may not see them."""
    numbers = key.to(tl.float32)
    return tl.where(numbers == numbers, numbers, 0.0).to(key.dtype)
