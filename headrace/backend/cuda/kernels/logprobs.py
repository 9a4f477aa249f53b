"""Log-probabilities of rows of logits: of a token, with its rank, and of the likeliest tokens."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_table import (
    DESCRIBED_COLUMNS,
    DESCRIBED_ROW,
    DESCRIBED_SAMPLE,
    DESCRIBED_TOKEN,
    DESCRIBED_TOP,
    NO_TOKEN,
)
from headrace.backend.cuda.launch import Launch, blocks, power_of_2

CHUNK = 2048
"""Tokens of a chunk."""


def logprobs(
    logits: Any,
    described: Any,
    tokens: Any,
    chunks: tuple[Any, Any, Any, Any],
    results: tuple[Any, Any, Any, Any],
    chunk: int = CHUNK,
) -> list[Launch]:
    """Describe a token per row of logits. A table [described, 4] names the rows and tokens.

    The `tokens` of samples or the table give the tokens. `chunks` [described, chunks] is memory
    for the top of each chunk, its token, its mass and the number of tokens that are no worse.
    Results are the rank [described] (0 if the row is not finite), the log-probability
    [described], and ids and log-probabilities of the likeliest tokens [described, top].
    """
    size, vocab = len(described), logits.shape[1]
    num_chunks = blocks(vocab, chunk)
    args = (logits, logits.stride(0), described, tokens, *chunks, vocab, num_chunks)
    warps = 8 if chunk >= 2048 else 4
    merging = {"BLOCK": chunk, "CHUNKS": power_of_2(num_chunks), "num_warps": warps}
    return [
        Launch(
            logprobs_chunk_kernel, (size, num_chunks), args, {"BLOCK": chunk, "num_warps": warps}
        ),
        Launch(logprobs_row_kernel, (size,), (*args, *results, results[2].shape[1]), merging),
    ]


@triton.jit
def _token_of(item, tokens):
    """The token to describe, clipped to the vocabulary."""
    sample = tl.load(item + DESCRIBED_SAMPLE)
    token = tl.load(item + DESCRIBED_TOKEN)
    if sample >= 0:
        token = tl.load(tokens + sample)
    return tl.maximum(token, 0)


@triton.jit
def logprobs_chunk_kernel(
    logits, stride, described, tokens, chunk_tops, chunk_top_ids, chunk_masses, chunk_counts,
    vocab, num_chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Describe one chunk of one row; its top is NaN if a logit is."""
    i = tl.program_id(0)
    chunk = tl.program_id(1)
    item = described + i * DESCRIBED_COLUMNS
    row_index = tl.load(item + DESCRIBED_ROW)
    if row_index >= 0:
        row = logits + row_index.to(tl.int64) * stride
        token = _token_of(item, tokens)
        own = tl.load(row + token)
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(row + ids, mask=inside, other=float("-inf"))
        bad = tl.max((x != x).to(tl.int32), 0)
        x = tl.where(x != x, float("-inf"), x)
        top = tl.max(x, 0)
        safe_top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        no_worse = inside & ((x > own) | ((x == own) & (ids <= token)))
        at = i * num_chunks + chunk
        tl.store(chunk_tops + at, tl.where(bad != 0, float("nan"), top))
        tl.store(chunk_top_ids + at, tl.min(tl.where(inside & (x == top), ids, NO_TOKEN), 0))
        tl.store(chunk_masses + at, tl.sum(tl.exp(tl.minimum(x - safe_top, 0.0)), 0))
        tl.store(chunk_counts + at, tl.sum(no_worse.to(tl.int32), 0))


@triton.jit
def _below(x, top, log_mass):
    """Log-probability of a logit."""
    return (x.to(tl.float64) - top.to(tl.float64) - log_mass).to(tl.float32)


@triton.jit
def logprobs_row_kernel(
    logits, stride, described, tokens, chunk_tops, chunk_top_ids, chunk_masses, chunk_counts,
    vocab, num_chunks, ranks, own_logprobs, top_ids, top_logprobs, top_stride,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Describe one row from its chunks; each next best token is the best of their tops."""
    i = tl.program_id(0)
    item = described + i * DESCRIBED_COLUMNS
    row_index = tl.load(item + DESCRIBED_ROW)
    if row_index >= 0:
        row = logits + row_index.to(tl.int64) * stride
        lanes = tl.arange(0, CHUNKS)
        at = i * num_chunks + lanes
        given = lanes < num_chunks
        tops = tl.load(chunk_tops + at, mask=given, other=float("-inf"))
        ids = tl.load(chunk_top_ids + at, mask=given, other=NO_TOKEN)
        bad = tl.max((tops != tops).to(tl.int32), 0)
        top = tl.max(tl.where(tops != tops, float("-inf"), tops), 0)
        if (bad != 0) | (tl.abs(top) == float("inf")):
            tl.store(ranks + i, 0)
        else:
            masses = tl.load(chunk_masses + at, mask=given, other=0.0).to(tl.float64)
            total = tl.sum(masses * tl.exp(tops - top).to(tl.float64), 0)
            log_mass = tl.log(total)
            own = tl.load(row + _token_of(item, tokens))
            tl.store(ranks + i, tl.sum(tl.load(chunk_counts + at, mask=given, other=0), 0))
            tl.store(own_logprobs + i, _below(own, top, log_mass))
            for n in range(0, tl.load(item + DESCRIBED_TOP)):
                best = tl.max(tops, 0)
                best_id = tl.min(tl.where(tops == best, ids, NO_TOKEN), 0)
                tl.store(top_ids + i * top_stride + n, best_id)
                tl.store(top_logprobs + i * top_stride + n, _below(best, top, log_mass))
                chunk = best_id // BLOCK
                rest = chunk * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(row + rest, mask=rest < vocab, other=float("-inf"))
                worse = (rest < vocab) & ((x < best) | ((x == best) & (rest > best_id)))
                next_top = tl.max(tl.where(worse, x, float("-inf")), 0)
                next_id = tl.min(tl.where(worse & (x == next_top), rest, NO_TOKEN), 0)
                tops = tl.where(lanes == chunk, next_top, tops)
                ids = tl.where(lanes == chunk, next_id, ids)
