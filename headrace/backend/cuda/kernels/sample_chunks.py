"""The best token of each row of logits, with and without noise: first by chunk, then by row."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_noise import noisiest, score, words_of_tile
from headrace.backend.cuda.kernels.sample_table import COLUMNS, IS_NOISY, NO_TOKEN, ROW, logits_of
from headrace.backend.cuda.launch import Launch, blocks, power_of_2

CHUNK = 2048
"""Tokens of a chunk."""


def sample_chunks(
    logits: Any,
    adjusted: Any,
    table: Any,
    doubles: Any,
    chunks: tuple[Any, Any, Any, Any],
    tops: Any,
    tokens: Any,
    noisy: bool,
    chunk: int = CHUNK,
) -> list[Launch]:
    """Write the token of each sample without filters to `tokens` [samples]; -1 if a logit is not
    finite.

    `chunks` [samples, chunks] is memory for the top of each chunk, its token, and the logit and
    token of the noisiest one. `tops` [samples] gets the maximum logit of the row, read from
    `adjusted` [samples, vocab] or `logits` [rows, vocab].
    """
    samples, vocab = len(tokens), logits.shape[1]
    num_chunks = blocks(vocab, chunk)
    rows = (logits, logits.stride(0), adjusted, adjusted.stride(0), table, doubles)
    constants = {"BLOCK": chunk, "NOISY": noisy, "num_warps": 8 if chunk >= 2048 else 4}
    merging = {"BLOCK": power_of_2(num_chunks), "NOISY": noisy, "num_warps": 1}
    return [
        Launch(
            sample_chunk_kernel,
            (samples, num_chunks),
            (*rows, *chunks, vocab, num_chunks),
            constants,
        ),
        Launch(
            sample_merge_kernel,
            (samples,),
            (table, doubles, *chunks, tops, tokens, num_chunks),
            merging,
        ),
    ]


@triton.jit
def sample_chunk_kernel(
    logits, stride, adjusted, adjusted_stride, table, doubles, chunk_tops, chunk_top_ids,
    chunk_noisy, chunk_noisy_ids, vocab, num_chunks,
    BLOCK: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Reduce one chunk of one sample; its top is NaN if a logit is."""
    d = tl.program_id(0)
    chunk = tl.program_id(1)
    fields = table + d * COLUMNS
    if tl.load(fields + ROW) >= 0:
        row = logits_of(logits, stride, adjusted, adjusted_stride, fields, d)
        first = chunk * BLOCK
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        bad = tl.max((x != x).to(tl.int32), 0)
        x = tl.where(x != x, float("-inf"), x)
        top = tl.max(x, 0)
        at = d * num_chunks + chunk
        tl.store(chunk_tops + at, tl.where(bad != 0, float("nan"), top))
        tl.store(chunk_top_ids + at, tl.min(tl.where(x == top, ids, NO_TOKEN), 0))
        if NOISY:
            is_noisy = tl.load(fields + IS_NOISY)
            if is_noisy != 0:
                token, noisy_x = noisiest(
                    x,
                    ids,
                    words_of_tile(first, fields, BLOCK),
                    top,
                    doubles + d * (COLUMNS // 2),
                    fields,
                )
                tl.store(chunk_noisy + at, noisy_x)
                tl.store(chunk_noisy_ids + at, token)


@triton.jit
def sample_merge_kernel(
    table, doubles, chunk_tops, chunk_top_ids, chunk_noisy, chunk_noisy_ids, tops, tokens,
    num_chunks,
    BLOCK: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Reduce one sample from its chunks."""
    d = tl.program_id(0)
    fields = table + d * COLUMNS
    if tl.load(fields + ROW) >= 0:
        lanes = tl.arange(0, BLOCK)
        at = d * num_chunks + lanes
        inside = lanes < num_chunks
        chunk_top = tl.load(chunk_tops + at, mask=inside, other=float("-inf"))
        bad = tl.max((chunk_top != chunk_top).to(tl.int32), 0)
        chunk_top = tl.where(chunk_top != chunk_top, float("-inf"), chunk_top)
        top = tl.max(chunk_top, 0)
        ids = tl.load(chunk_top_ids + at, mask=inside, other=NO_TOKEN)
        token = tl.min(tl.where(chunk_top == top, ids, NO_TOKEN), 0)
        is_finite = (bad == 0) & (tl.abs(top) < float("inf"))
        if NOISY:
            is_noisy = tl.load(fields + IS_NOISY)
            if is_noisy != 0:
                noisy_ids = tl.load(chunk_noisy_ids + at, mask=inside, other=NO_TOKEN)
                x = tl.load(chunk_noisy + at, mask=inside, other=float("-inf"))
                x = tl.where(is_finite, x, 0.0)  # no NaN from infinities
                scores = score(
                    x,
                    tl.where(is_finite, top, 0.0),
                    noisy_ids,
                    doubles + d * (COLUMNS // 2),
                    fields,
                )
                scores = tl.where(inside, scores, float("-inf"))
                token = tl.min(tl.where(scores == tl.max(scores, 0), noisy_ids, NO_TOKEN), 0)
        tl.store(tops + d, top)
        tl.store(tokens + d, tl.where(is_finite, token, -1))
