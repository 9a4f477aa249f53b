"""Samples under min_p, top_k and top_p, without a sort.

Filters keep the best tokens of a row down to some place, and the sample is the noisiest of them.
So the noisiest token of all is the sample if it is kept, which the mass of better tokens decides.
Otherwise the search continues among the better tokens: one or two passes on average. Only top_k
finds its place first, because top_p counts the mass that top_k keeps.

A floor under all kept tokens, from min_p or from the k-th of the chunk tops, usually leaves few
tokens. They are listed first.
"""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_noise import (
    MAX_GUMBEL,
    noisiest,
    score,
    word_of,
    words_of_tile,
)
from headrace.backend.cuda.kernels.sample_table import (
    COLUMNS,
    IS_FILTERED,
    MIN_P_DEPTH,
    NO_TOKEN,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    logits_of,
)
from headrace.backend.cuda.launch import Launch, power_of_2

LISTED = 4096
"""Most tokens that are listed; where there are more, the row itself is read."""


def sample_filter(
    logits: Any,
    adjusted: Any,
    table: Any,
    doubles: Any,
    chunk_tops: Any,
    lists: tuple[Any, Any],
    tops: Any,
    tokens: Any,
    chunk: int,
    block: int = LISTED,
) -> Launch:
    """Replace the tokens [samples] of samples with filters, by `tops` of the row and of each
    chunk.

    `lists` is memory for the logits and ids of listed tokens [samples, listed].
    """
    vocab, num_chunks = logits.shape[1], chunk_tops.shape[1]
    return Launch(
        sample_filter_kernel,
        (len(tokens),),
        (
            *(logits, logits.stride(0), adjusted, adjusted.stride(0), table, doubles),
            *(chunk_tops, *lists, tops, tokens, vocab, num_chunks, lists[0].shape[1]),
        ),
        {
            **{"BLOCK": block, "CHUNK": chunk, "CHUNKS": power_of_2(num_chunks)},
            "num_warps": 16 if block >= LISTED else 4,
        },
    )


@triton.jit
def sample_filter_kernel(
    logits, stride, adjusted, adjusted_stride, table, doubles, chunk_tops, list_logits, list_ids,
    tops, tokens, vocab, num_chunks, listed,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Filter one sample: list the tokens above a floor, then search the list, or the row if
    there is none.
    """
    d = tl.program_id(0)
    fields = table + d * COLUMNS
    numbers = doubles + d * (COLUMNS // 2)
    token = tl.load(tokens + d)
    if (tl.load(fields + IS_FILTERED) != 0) & (token >= 0):
        row = logits_of(logits, stride, adjusted, adjusted_stride, fields, d)
        token_x = tl.load(row + token)
        top = tl.load(tops + d)
        k = tl.load(fields + TOP_K)
        floor = (top.to(tl.float64) + tl.load(numbers + MIN_P_DEPTH)).to(tl.float32)
        chunks = tl.arange(0, CHUNKS)
        in_row = chunks < num_chunks
        chunk_top = tl.load(chunk_tops + d * num_chunks + chunks, mask=in_row, other=float("-inf"))
        if (k > 0) & (k <= num_chunks):
            ordered = tl.sort(chunk_top, descending=True)
            floor = tl.maximum(floor, tl.sum(tl.where(chunks == k - 1, ordered, 0.0), 0))

        size = vocab + 0 * k
        ids_of_list = list_ids + d * listed
        is_listed = floor > float("-inf")
        if is_listed:
            logits_of_list = list_logits + d * listed
            num_listed = _list(
                row, chunk_top >= floor, floor, logits_of_list, ids_of_list, vocab, listed,
                CHUNK, CHUNKS,
            )  # fmt: skip
            is_listed = num_listed <= listed
            if is_listed:
                row = logits_of_list
                size = num_listed
            tl.debug_barrier()  # other threads read the list

        last = NO_TOKEN + 0 * token
        if k > 0:
            floor, last = _worst_of_best(row, ids_of_list, is_listed, size, floor, k, BLOCK)
        share = tl.load(numbers + TOP_P)
        is_kept = _is_kept(token_x, token, floor, last)
        bound_x = floor
        bound = last
        is_going = (share < 1) | (is_kept == 0)
        while is_going:
            if is_kept == 0:
                token_x, token = _noisiest_of(
                    row, ids_of_list, is_listed, size, bound_x, bound, top, numbers, fields, BLOCK
                )
            is_going = share < 1
            if is_going:
                total, better = _masses(
                    row, ids_of_list, is_listed, size, floor, last, token_x, token, top, numbers,
                    BLOCK,
                )  # fmt: skip
                is_kept = better < share * total
                bound_x = token_x
                bound = token - 1
                is_going = is_kept == 0
        tl.store(tokens + d, token)


@triton.jit
def _list(
    row, is_high, floor, list_logits, list_ids, vocab, listed,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """List the tokens of some chunks that reach the floor, by ascending id; return their number.

    Only the first `listed` are written.
    """
    chunks = tl.arange(0, CHUNKS)
    size = tl.zeros((), tl.int32)
    chunk = tl.min(tl.where(is_high, chunks, CHUNKS), 0)
    while chunk < CHUNKS:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        reaches = (x >= floor).to(tl.int32)
        at = size + tl.cumsum(reaches, 0) - 1
        fits = (reaches != 0) & (at < listed)
        tl.store(list_logits + at, x, mask=fits)
        tl.store(list_ids + at, ids, mask=fits)
        size += tl.sum(reaches, 0)
        chunk = tl.min(tl.where(is_high & (chunks > chunk), chunks, CHUNKS), 0)
    return size


@triton.jit
def _is_kept(x, ids, floor, last):
    """Whether tokens are among the best down to token `last` with logit `floor`; ties go to the
    lower id.
    """
    return (x > floor) | ((x == floor) & (ids <= last))


@triton.jit
def _load(row, list_ids, is_listed, first, size, BLOCK: tl.constexpr):
    """Load logits and ids of a block; -inf and NO_TOKEN after the end."""
    at = first + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < size, other=float("-inf"))
    ids = tl.where(at < size, at, NO_TOKEN)
    if is_listed:
        ids = tl.load(list_ids + at, mask=at < size, other=NO_TOKEN)
    return x, ids


@triton.jit
def _masses(
    row, list_ids, is_listed, size, floor, last, token_x, token, top, numbers, BLOCK: tl.constexpr
):
    """Mass of the kept tokens, and of the tokens better than a token.

    Sums are in float64: with two equal tokens and a little more, the first has no half.
    """
    factor = (1 / tl.load(numbers + TEMPERATURE)).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float64)
    better = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, size, BLOCK):
        x, ids = _load(row, list_ids, is_listed, first, size, BLOCK)
        weights = tl.where(_is_kept(x, ids, floor, last), tl.exp((x - top) * factor), 0.0).to(
            tl.float64
        )
        total += weights
        better += tl.where(_is_kept(x, ids, token_x, token - 1), weights, 0.0)
    return tl.sum(total, 0), tl.sum(better, 0)


@triton.jit
def _noisiest_of(
    row, list_ids, is_listed, size, floor, last, top, numbers, fields, BLOCK: tl.constexpr
):
    """Logit and id of the noisiest token among the best tokens, down to one."""
    temperature = tl.load(numbers + TEMPERATURE)
    best = float("-inf") + 0 * temperature
    best_x = top
    token = NO_TOKEN + 0 * last
    for first in range(0, size, BLOCK):
        x, ids = _load(row, list_ids, is_listed, first, size, BLOCK)
        x = tl.where(_is_kept(x, ids, floor, last), x, float("-inf"))
        tile_top = tl.max(x, 0)
        if (tile_top.to(tl.float64) - top.to(tl.float64)) / temperature + MAX_GUMBEL > best:
            words = word_of(ids, fields) if is_listed else words_of_tile(first, fields, BLOCK)
            tile_token, tile_x = noisiest(x, ids, words, tile_top, numbers, fields)
            if tile_token < NO_TOKEN:
                tile_score = score(tile_x, top, tile_token, numbers, fields)
                if tile_score > best:
                    best = tile_score
                    best_x = tile_x
                    token = tile_token
    return best_x, token


@triton.jit
def _keys(x):
    """Integers in the order of the logits; both zeros map to one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _logit(key):
    """Logit of such an integer."""
    return tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _worst_of_best(row, list_ids, is_listed, size, floor, k, BLOCK: tl.constexpr):
    """Logit and id of the k-th best token, or of the last one not below `floor`."""
    prefix = tl.zeros((), tl.uint32)
    left = k
    digits = tl.arange(0, 256)
    for step in range(4):  # digits of 8 bits, from the highest on
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, size, BLOCK):
            x, ids = _load(row, list_ids, is_listed, first, size, BLOCK)
            keys = _keys(x)
            inside = (ids < NO_TOKEN) & (x >= floor) & ((keys >> shift >> 8) == prefix)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=inside)
        left = tl.minimum(left, tl.sum(counts, 0))
        better = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        has_it = (better < left) & (left <= better + counts)
        left -= tl.sum(tl.where(has_it, better, 0), 0)
        prefix = (prefix << 8) | tl.sum(tl.where(has_it, digits, 0), 0).to(tl.uint32)
    last = NO_TOKEN + 0 * k
    seen = 0 * k
    for first in range(0, size, BLOCK):
        x, ids = _load(row, list_ids, is_listed, first, size, BLOCK)
        is_equal = (ids < NO_TOKEN) & (_keys(x) == prefix)
        rank = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        last = tl.minimum(last, tl.min(tl.where(is_equal & (rank == left), ids, NO_TOKEN), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return _logit(prefix), last
