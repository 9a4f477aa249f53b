"""Builds the ragged batch of a step."""

import numpy as np
from numpy.typing import NDArray

from headrace.batch import DraftTree, Ints, RaggedBatch, ints
from headrace.engine.scheduled import ScheduledSequence
from headrace.kv.rows import WrittenRows, kv_rows

WORD_BITS = 64
"""Draft rows per word of `RaggedBatch.ancestors`."""


def build_batch(scheduled: list[ScheduledSequence], block_size: int) -> RaggedBatch:
    """Return the batch, and set each sequence's indices among the logit and pooled rows."""
    tokens: list[int] = []
    logit_rows: list[int] = []
    pooled_rows: list[int] = []

    for item in scheduled:
        seq, start = item.seq, len(tokens)
        first, end = seq.computed, seq.computed + item.num_scheduled

        # Rows: the scheduled tokens, then the draft. A pending token is alone in its step, and
        # comes from `token_source`.
        tokens += seq.known[first:end] if end <= len(seq.known) else [0]
        last = len(tokens) - 1
        if item.draft.tokens:
            tokens += item.draft.tokens

        # Rows with logits, and rows to pool.
        item.first_score_row = len(logit_rows)
        if seq.request.reads_prompt_rows:
            item.scored = seq.prompt_rows(item.num_scheduled)
            logit_rows += [start + position - first for position in item.scored]
            item.first_pooled_row = len(pooled_rows)
            item.pooled = seq.pooled_rows(item.num_scheduled)
            pooled_rows += [start + position - first for position in item.pooled]
        item.first_sample_row = len(logit_rows)
        if item.can_sample:
            logit_rows += range(last, len(tokens))

    context_len = ints([item.seq.computed for item in scheduled])
    num_scheduled = [item.num_scheduled for item in scheduled]
    num_rows = num_scheduled
    has_drafts = len(tokens) > sum(num_scheduled)
    if has_drafts:
        num_rows = [item.num_scheduled + len(item.draft.tokens) for item in scheduled]
    rows = WrittenRows.of(context_len, num_rows)
    gathered = ints(logit_rows)
    return RaggedBatch(
        tokens=ints(tokens),
        positions=_positions(scheduled, rows) if has_drafts else rows.indices,
        row_start=rows.row_start,
        context_len=context_len,
        scheduled_len=ints(num_scheduled),
        kv=kv_rows([item.seq.tables for item in scheduled], rows, block_size),
        ancestors=_ancestors(scheduled, rows) if has_drafts else None,
        logit_rows=gathered,
        seq_of=rows.seqs[gathered],
        token_source=_token_source(scheduled, rows),
        adapters=_adapters(scheduled),
        pooled_rows=ints(pooled_rows) if pooled_rows else None,
    )


def _token_source(scheduled: list[ScheduledSequence], rows: WrittenRows) -> Ints | None:
    """Return the last launch's op that samples each pending token, [rows]; None without one."""
    pending = [i for i, item in enumerate(scheduled) if item.seq.num_pending]
    if not pending:
        return None
    source = np.full(len(rows.seqs), -1, np.int32)
    source[rows.row_start[pending]] = [scheduled[i].seq.last_op for i in pending]
    return source


def _adapters(scheduled: list[ScheduledSequence]) -> Ints | None:
    adapters = [item.seq.request.adapter for item in scheduled]
    if not any(adapters):
        return None
    return ints([adapter.number if adapter else -1 for adapter in adapters])


def _positions(scheduled: list[ScheduledSequence], rows: WrittenRows) -> Ints:
    """Return the position of each row, [rows]: a draft row has its depth in the tree."""
    positions = rows.indices.copy()
    for item, start in zip(scheduled, rows.row_start.tolist(), strict=False):
        if item.draft.tokens:
            first = start + item.num_scheduled
            depths = ints(_depths(item.draft))
            positions[first : first + len(depths)] = positions[first - 1] + depths
    return positions


def _depths(draft: DraftTree) -> list[int]:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _ancestors(scheduled: list[ScheduledSequence], rows: WrittenRows) -> NDArray[np.uint64] | None:
    """Return a bit for each draft row that a row sees, [rows, words]; None if all are chains."""
    if all(
        parent == node - 1 for item in scheduled for node, parent in enumerate(item.draft.parents)
    ):
        return None
    num_words = -(-max(len(item.draft.tokens) for item in scheduled) // WORD_BITS)
    bits = np.zeros((len(rows.seqs), num_words), np.uint64)
    for item, start in zip(scheduled, rows.row_start.tolist(), strict=False):
        first = start + item.num_scheduled
        for node, parent in enumerate(item.draft.parents):
            if parent >= 0:
                bits[first + node] = bits[first + parent]
            bits[first + node, node // WORD_BITS] |= np.uint64(1 << node % WORD_BITS)
    return bits
