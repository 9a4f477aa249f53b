"""Products of a packed matrix with rows of activations, for linear ops, experts and heads.

The matrix is the first operand: its numbers go from registers to the tensor cores, and rows of
activations from shared memory. A product sums over columns in order in one float32 accumulator,
whatever the tile, so a row has the same bits in every batch.
"""

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.code_pairs import (
    from_bytes,
    scaled,
    scaled_by_bf16,
    scaled_bytes,
    scaled_in_float32,
    small_floats,
    subtract_zero,
)
from headrace.backend.cuda.kernels.quantise_rows import is_outlier
from headrace.backend.cuda.kernels.weight_format import over_columns, table_numbers


@triton.jit
def decode(codes, lookup, OFFSET: tl.constexpr, LOOKUP: tl.constexpr):
    """Decode codes to float32, before scales."""
    if LOOKUP == "table":
        values = tl.load(lookup + codes.to(tl.int32))
    elif LOOKUP == "e2m1":
        # as the lowest numbers of float32, which have the same exponents and fractions but for
        # the factor 2**126
        values = ((codes & 7) << 22 | (codes & 8) << 28).to(
            tl.float32, bitcast=True
        ) * 8.507059173023462e37
    else:
        values = codes.to(tl.float32) if OFFSET == 0 else codes.to(tl.float32) + OFFSET
    return values


@triton.jit
def plane_codes(words, plane, PLANES: tl.constexpr):
    """Codes of a plane of stored words, by plain operations."""
    if PLANES == 4:
        codes = words.to(tl.int32) >> (4 * plane) & 15
    elif PLANES == 2:
        codes = (words.to(tl.int32) >> (8 * plane) & 255) - 128
    else:
        codes = words
    return codes


@triton.jit
def _of_plane(
    table, tile, rows, num_rows, KIND: tl.constexpr, PLANE: tl.constexpr, FORMAT: tl.constexpr
):
    """Scales, zero points or minima of a plane, float32 [rows, 1], or [rows, PART] if it has
    several groups.
    """
    part: tl.constexpr = FORMAT.tile // FORMAT.planes
    numbers = table_numbers(
        table, tile, rows, num_rows, KIND, PLANE * part, FORMAT.group, part, FORMAT.tile
    )
    return numbers if numbers.shape[1] == 1 else over_columns(numbers, part)


@triton.jit
def _scales(scales, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr):
    kind: tl.constexpr = FORMAT.scale
    return _of_plane(scales, tile, rows, num_rows, kind, PLANE, FORMAT)


@triton.jit
def _zeros(zeros, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr):
    kind: tl.constexpr = FORMAT.zero_store
    return _of_plane(zeros, tile, rows, num_rows, kind, PLANE, FORMAT)


@triton.jit
def _scaled_plane(
    values, scales, zeros, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr
):
    """Decoded codes of a plane, float32 [rows, PART], with their scales and zeros."""
    scale = _scales(scales, tile, rows, num_rows, PLANE, FORMAT)
    if FORMAT.zero == "point":
        zero = _zeros(zeros, tile, rows, num_rows, PLANE, FORMAT)
        values = (values - zero) * scale
    elif FORMAT.zero == "minimum":
        minimum = _zeros(zeros, tile, rows, num_rows, PLANE, FORMAT)
        values = values * scale + minimum
    else:
        values = values * scale
    return values.to(tl.bfloat16 if FORMAT.compute == "bf16" else tl.float32)


@triton.jit
def _plain_plane(
    words, scales, zeros, lookup, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr
):
    """Numbers of a plane of stored words, by plain operations."""
    kind: tl.constexpr = FORMAT.lookup
    values = decode(plane_codes(words, PLANE, FORMAT.planes), lookup, FORMAT.offset, kind)
    return _scaled_plane(values, scales, zeros, tile, rows, num_rows, PLANE, FORMAT)


@triton.jit
def _addend(zeros, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr):
    """The number that `subtract_zero` adds to the codes of a plane, bf16 [rows, PART]."""
    part: tl.constexpr = FORMAT.tile // 4
    if FORMAT.zero == "point":
        added = -128.0 - _zeros(zeros, tile, rows, num_rows, PLANE, FORMAT)
    else:
        added = tl.full([1, 1], FORMAT.offset - 128, tl.float32)
    return tl.broadcast_to(added.to(tl.bfloat16), [rows.shape[0], part])


@triton.jit
def _whole_codes(words, zeros, tile, rows, num_rows, FORMAT: tl.constexpr):
    """Codes of the four planes of 4-bit words, less their zeros, in bf16."""
    return subtract_zero(
        words,
        _addend(zeros, tile, rows, num_rows, 0, FORMAT),
        _addend(zeros, tile, rows, num_rows, 1, FORMAT),
        _addend(zeros, tile, rows, num_rows, 2, FORMAT),
        _addend(zeros, tile, rows, num_rows, 3, FORMAT),
    )


@triton.jit
def _short_plane(
    codes, scales, zeros, tile, rows, num_rows, PLANE: tl.constexpr, FORMAT: tl.constexpr
):
    """Numbers of a plane of 4-bit codes in bf16, two at a time."""
    scale = _scales(scales, tile, rows, num_rows, PLANE, FORMAT)
    if FORMAT.decoder == "pairs":
        values = scaled(codes, scale)
    elif FORMAT.decoder == "pairs by bf16":
        values = scaled_by_bf16(codes, scale)
    else:
        scale = tl.broadcast_to(scale, codes.shape)
        minimum = scale
        if FORMAT.zero == "minimum":
            minimum = tl.broadcast_to(
                _zeros(zeros, tile, rows, num_rows, PLANE, FORMAT),
                codes.shape,
            )
        values = scaled_in_float32(codes, scale, minimum, FORMAT.zero == "minimum")
    return values


@triton.jit
def _side_by_side(left, right):
    """Columns of two tensors of one shape; it moves no number to another thread."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _of_nibbles(words, scales, zeros, lookup, tile, rows, num_rows, FORMAT: tl.constexpr):
    """Numbers of a tile of 4-bit codes."""
    if FORMAT.decoder == "plain":
        a = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 0, FORMAT)
        b = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 1, FORMAT)
        c = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 2, FORMAT)
        d = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 3, FORMAT)
    else:
        if FORMAT.lookup == "e2m1":
            codes = small_floats(words)
        else:
            codes = _whole_codes(words, zeros, tile, rows, num_rows, FORMAT)
        a = _short_plane(codes[0], scales, zeros, tile, rows, num_rows, 0, FORMAT)
        b = _short_plane(codes[1], scales, zeros, tile, rows, num_rows, 1, FORMAT)
        c = _short_plane(codes[2], scales, zeros, tile, rows, num_rows, 2, FORMAT)
        d = _short_plane(codes[3], scales, zeros, tile, rows, num_rows, 3, FORMAT)
    return _side_by_side(_side_by_side(a, b), _side_by_side(c, d))


@triton.jit
def _of_bytes(words, scales, zeros, lookup, tile, rows, num_rows, FORMAT: tl.constexpr):
    """Numbers of a tile of 8-bit codes, two in a word."""
    if FORMAT.decoder == "fused bytes":
        first = _scales(scales, tile, rows, num_rows, 0, FORMAT)
        second = _scales(scales, tile, rows, num_rows, 1, FORMAT)
        a, b = scaled_bytes(
            words, tl.broadcast_to(first, words.shape), tl.broadcast_to(second, words.shape)
        )
    elif FORMAT.decoder == "bytes":
        less = tl.full(words.shape, 8388608 + 128 - FORMAT.offset, tl.float32)  # 2**23
        a, b = from_bytes(words, less)
        a = _scaled_plane(a, scales, zeros, tile, rows, num_rows, 0, FORMAT)
        b = _scaled_plane(b, scales, zeros, tile, rows, num_rows, 1, FORMAT)
    else:
        a = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 0, FORMAT)
        b = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 1, FORMAT)
    return _side_by_side(a, b)


@triton.jit
def _tile_numbers(words, scales, zeros, lookup, tile, rows, num_rows, FORMAT: tl.constexpr):
    """Turn the stored words of a tile into the numbers of a product, [rows, columns]."""
    if FORMAT.family == "numbers":
        values = words.to(tl.bfloat16 if FORMAT.compute == "bf16" else tl.float32)
    elif FORMAT.family == "nibbles":
        values = _of_nibbles(words, scales, zeros, lookup, tile, rows, num_rows, FORMAT)
    elif FORMAT.family == "bytes":
        values = _of_bytes(words, scales, zeros, lookup, tile, rows, num_rows, FORMAT)
    else:
        values = _plain_plane(words, scales, zeros, lookup, tile, rows, num_rows, 0, FORMAT)
    return values


@triton.jit
def _spread(kept, places, tile, rows, num_rows, FORMAT: tl.constexpr):
    """Put the kept values of a tile of 2:4 weights to their columns, and 0 to all others."""
    quads: tl.constexpr = FORMAT.tile // 4
    quad = tl.arange(0, quads)
    word = tile * (FORMAT.tile // 32) + quad // 8
    words = tl.load(places + word[None, :] * num_rows + rows[:, None])
    bits = words >> (quad % 8 * 4)[None, :]
    first, second = tl.split(tl.reshape(kept, [rows.shape[0], quads, 2]))
    none = tl.zeros_like(first)
    has_0, has_1, has_2, has_3 = bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0
    even = tl.join(
        tl.where(has_0, first, none), tl.where(has_2, tl.where(has_3, first, second), none)
    )
    odd = tl.join(
        tl.where(has_1, tl.where(has_0, second, first), none), tl.where(has_3, second, none)
    )
    return tl.reshape(tl.join(even, odd), [rows.shape[0], FORMAT.tile])


@triton.jit
def _activations(x, offsets, mask, order, first, columns, FORMAT: tl.constexpr):
    """Load a tile of rows of x from a column on, in the matrix's order; 0 after the last column."""
    k = first + tl.arange(0, FORMAT.tile)
    if FORMAT.is_whole:
        at = tl.load(order + k) if FORMAT.is_ordered else k
        values = tl.load(x + offsets[:, None] + at[None, :], mask=mask[:, None], other=0)
    else:
        inside = k < columns
        at = tl.load(order + k, mask=inside, other=0) if FORMAT.is_ordered else k
        values = tl.load(
            x + offsets[:, None] + at[None, :], mask=mask[:, None] & inside[None, :], other=0
        )
    return values.to(tl.bfloat16 if FORMAT.compute == "bf16" else tl.float32)


@triton.jit
def product(
    x, offsets, mask, columns, codes, scales, zeros, lookup, order, rows, num_rows,
    first_tile, last_tile, FORMAT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of a weight with rows of x at `offsets`, over a range of tiles of columns,
    UNROLL of them in a round of the loop: float32 [rows, rows of x].
    """
    stored: tl.constexpr = FORMAT if FORMAT.kept is None else FORMAT.kept
    part: tl.constexpr = stored.tile // stored.planes
    num_tiles = tl.cdiv(columns, FORMAT.tile)
    at = codes + rows.to(tl.int64)[:, None] * (num_tiles * part) + tl.arange(0, part)[None, :]
    sums = tl.zeros([rows.shape[0], offsets.shape[0]], tl.float32)
    for tile in tl.range(first_tile, last_tile, loop_unroll_factor=UNROLL):
        words = tl.load(at + tile * part)
        w = _tile_numbers(words, scales, zeros, lookup, tile, rows, num_rows, stored)
        if FORMAT.kept is not None:
            w = _spread(w, zeros, tile, rows, num_rows, FORMAT)
        a = _activations(x, offsets, mask, order, tile * FORMAT.tile, columns, FORMAT)
        sums = tl.dot(w, tl.trans(a), sums, input_precision=FORMAT.precision)
    return sums


@triton.jit
def int8_product(
    x_codes, x_scales, x, m, mask, code_offsets, offsets, columns, codes, scales, places, rows,
    num_rows, FORMAT: tl.constexpr,
):  # fmt: skip
    """Multiply an int8 matrix with int8 rows [rows, whole tiles], both scaled by row; sums are
    exact: float32 [rows, rows of x].

    If the family has outliers, the numbers of x that the codes leave out are multiplied as floats,
    in two bf16 parts; bf16 represents all codes of weights.
    """
    k = tl.arange(0, FORMAT.tile)
    num_tiles = tl.cdiv(columns, FORMAT.tile)
    stored: tl.constexpr = FORMAT.tile if FORMAT.kept is None else FORMAT.tile // 2
    at = codes + rows.to(tl.int64)[:, None] * (num_tiles * stored) + tl.arange(0, stored)[None, :]
    exact = tl.zeros([rows.shape[0], m.shape[0]], tl.int32)
    wide = tl.zeros([rows.shape[0], m.shape[0]], tl.float32)
    for tile in range(0, num_tiles):
        w = tl.load(at + tile * stored)
        if FORMAT.kept is not None:
            w = _spread(w, places, tile, rows, num_rows, FORMAT)
        first = tile * FORMAT.tile
        a = tl.load(x_codes + code_offsets[:, None] + (first + k)[None, :], mask[:, None], 0)
        exact = tl.dot(w, tl.trans(a), exact, out_dtype=tl.int32)
        if FORMAT.family == "int8 rows, outliers":
            v = tl.load(
                x + offsets[:, None] + (first + k)[None, :],
                mask=mask[:, None] & (first + k < columns)[None, :],
                other=0,
            )
            v = tl.where(is_outlier(v.to(tl.float32)), v.to(tl.float32), 0.0)
            if tl.max(tl.abs(v)) > 0:
                high, weights = v.to(tl.bfloat16), w.to(tl.float32).to(tl.bfloat16)
                low = (v - high.to(tl.float32)).to(tl.bfloat16)
                wide = tl.dot(weights, tl.trans(low), wide)
                wide = tl.dot(weights, tl.trans(high), wide)
    scale = tl.load(x_scales + m, mask=mask, other=0.0)
    return (exact.to(tl.float32) * scale[None, :] + wide) * tl.load(scales + rows)[:, None]
