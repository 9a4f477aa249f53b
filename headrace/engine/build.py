"""From the parts of a step to the ragged batch that a program sees."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.batch import DraftTree, RaggedBatch
from headrace.engine.scheduler import ScheduledSequence
from headrace.kv.rows import ints, kv_rows

WORD_BITS = 64
"""DraftTree rows for which a word of `ancestors` has bits."""


def build(scheduled: list[ScheduledSequence], block_size: int) -> RaggedBatch:
    """One batch of all rows; notes in each part where its logits will be."""
    tokens: list[int] = []
    positions: list[int] = []
    written: list[range] = []
    row_start = [0]
    logit_rows: list[int] = []
    seq_of: list[int] = []
    for i, item in enumerate(scheduled):
        seq, draft = item.seq, item.draft
        first, end, start = seq.computed, seq.computed + item.num_scheduled, len(tokens)
        tokens += seq.known[first:end]
        positions += range(first, end)
        if draft.tokens:
            tokens += draft.tokens
            positions += (end - 1 + depth for depth in _depths(draft))
        written.append(range(first, end + len(draft.tokens)))
        row_start.append(len(tokens))
        item.first_logit = len(logit_rows)
        logit_rows += [start + position - first for position in seq.prompt_rows(item.num_scheduled)]
        item.first_draw = len(logit_rows)
        if item.draws:
            logit_rows += range(start + item.num_scheduled - 1, len(tokens))
        seq_of += [i] * (len(logit_rows) - item.first_logit)
    return RaggedBatch(
        tokens=ints(tokens),
        positions=ints(positions),
        row_start=ints(row_start),
        context_len=ints([item.seq.computed for item in scheduled]),
        scheduled_len=ints([item.num_scheduled for item in scheduled]),
        kv=kv_rows([item.seq.tables for item in scheduled], written, block_size),
        ancestors=_ancestors(scheduled, row_start),
        logit_rows=ints(logit_rows),
        seq_of=ints(seq_of),
    )


def _depths(draft: DraftTree) -> Iterator[int]:
    """Distance of each node from the last scheduled row."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return iter(depths)


def _ancestors(scheduled: list[ScheduledSequence], row_start: list[int]) -> NDArray[np.uint64] | None:  # [rows, words]
    """Bits over the draft rows of a sequence; None when every draft is a chain, in which all earlier nodes are ancestors."""
    if all(parent == node - 1 for item in scheduled for node, parent in enumerate(item.draft.parents)):
        return None
    words = -(-max(len(item.draft.tokens) for item in scheduled) // WORD_BITS)
    bits = np.zeros((row_start[-1], words), np.uint64)
    for item, start in zip(scheduled, row_start, strict=False):
        first = start + item.num_scheduled
        for node, parent in enumerate(item.draft.parents):
            if parent >= 0:
                bits[first + node] = bits[first + parent]
            bits[first + node, node // WORD_BITS] |= np.uint64(1 << node % WORD_BITS)
    return bits
