"""Builds the ragged batch of a step."""

import numpy as np
from numpy.typing import NDArray

from headrace.batch import DraftTree, Ints, RaggedBatch, ints
from headrace.engine.scheduled import ScheduledSequence
from headrace.kv.rows import kv_rows

WORD_BITS = 64
"""Draft rows per word of `RaggedBatch.ancestors`."""


def build_batch(scheduled: list[ScheduledSequence], block_size: int) -> RaggedBatch:
    """Return the batch, and set each sequence's indices among the logit and pooled rows."""
    tokens: list[int] = []
    positions: list[int] = []
    written: list[range] = []
    row_start = [0]
    logit_rows: list[int] = []
    seq_of: list[int] = []
    pooled_rows: list[int] = []
    pending: list[int] = []
    has_drafts = False

    for i, item in enumerate(scheduled):
        seq, start = item.seq, len(tokens)
        first, end = seq.computed, seq.computed + item.num_scheduled

        # Rows: the scheduled tokens, then the draft. A pending token is alone in its step, and
        # comes from `token_source`.
        tokens += seq.known[first:end] if end <= len(seq.known) else [0]
        rows = range(first, end)
        positions += rows
        if seq.num_pending:
            pending.append(i)
        if item.draft.tokens:
            has_drafts = True
            tokens += item.draft.tokens
            positions += (end - 1 + depth for depth in _depths(item.draft))
            rows = range(first, end + len(item.draft.tokens))
        written.append(rows)
        row_start.append(len(tokens))
        item.rows = range(start, start + item.num_scheduled)

        # Rows with logits, and rows to pool.
        item.first_score_row = len(logit_rows)
        if seq.request.reads_prompt_rows:
            item.scored = seq.prompt_rows(item.num_scheduled)
            logit_rows += [start + position - first for position in item.scored]
            item.pooled = seq.pooled_rows(item.num_scheduled)
            item.first_pooled_row = len(pooled_rows)
            pooled_rows += [start + position - first for position in item.pooled]
        item.first_sample_row = len(logit_rows)
        if item.can_sample:
            logit_rows += range(start + item.num_scheduled - 1, len(tokens))
        seq_of += [i] * (len(logit_rows) - item.first_score_row)

    return RaggedBatch(
        tokens=ints(tokens),
        positions=ints(positions),
        row_start=ints(row_start),
        context_len=ints([item.seq.computed for item in scheduled]),
        scheduled_len=ints([item.num_scheduled for item in scheduled]),
        kv=kv_rows([item.seq.tables for item in scheduled], written, block_size),
        ancestors=_ancestors(scheduled, row_start) if has_drafts else None,
        logit_rows=ints(logit_rows),
        seq_of=ints(seq_of),
        token_source=_token_source(scheduled, pending, row_start) if pending else None,
        adapters=_adapters(scheduled),
        pooled_rows=ints(pooled_rows) if pooled_rows else None,
    )


def _token_source(
    scheduled: list[ScheduledSequence], pending: list[int], row_start: list[int]
) -> Ints:
    """Return the last launch's op that samples each pending token, [rows]."""
    source = np.full(row_start[-1], -1, np.int32)
    for i in pending:
        source[row_start[i]] = scheduled[i].seq.last_op
    return source


def _adapters(scheduled: list[ScheduledSequence]) -> Ints | None:
    adapters = [item.seq.request.adapter for item in scheduled]
    if not any(adapters):
        return None
    return ints([adapter.number if adapter else -1 for adapter in adapters])


def _depths(draft: DraftTree) -> list[int]:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _ancestors(
    scheduled: list[ScheduledSequence], row_start: list[int]
) -> NDArray[np.uint64] | None:
    """Return a bit for each draft row that a row sees, [rows, words]; None if all are chains."""
    if all(
        parent == node - 1 for item in scheduled for node, parent in enumerate(item.draft.parents)
    ):
        return None
    num_words = -(-max(len(item.draft.tokens) for item in scheduled) // WORD_BITS)
    bits = np.zeros((row_start[-1], num_words), np.uint64)
    for item, start in zip(scheduled, row_start, strict=False):
        first = start + item.num_scheduled
        for node, parent in enumerate(item.draft.parents):
            if parent >= 0:
                bits[first + node] = bits[first + parent]
            bits[first + node, node // WORD_BITS] |= np.uint64(1 << node % WORD_BITS)
    return bits
