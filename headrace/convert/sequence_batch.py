"""Batches in which a token's KV slot is its position."""

from collections.abc import Sequence

import numpy as np

from headrace.batch import KvRows, RaggedBatch, ints
from headrace.config import KvConfig


def num_blocks(length: int) -> int:
    return -(-length // KvConfig.block_size)


def sequence_batch(
    tokens: Sequence[int], first: int, end: int, num_logits: int, blocks: int, num_groups: int
) -> RaggedBatch:
    positions, rows = ints(list(range(first, end))), end - first
    logit_rows = ints(list(range(max(0, rows - num_logits), rows)))
    return RaggedBatch(
        tokens=ints(list(tokens[first:end])),
        positions=positions,
        row_start=ints([0, rows]),
        context_len=ints([first]),
        scheduled_len=ints([rows]),
        kv=(KvRows(positions, np.arange(blocks, dtype=np.int32)[None]),) * num_groups,
        ancestors=None,
        logit_rows=logit_rows,
        seq_of=ints([0] * len(logit_rows)),
    )
