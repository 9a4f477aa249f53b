"""Batches of one sequence, whose slots are its positions: pieces of a text, each in a cache of its
own.
"""

from collections.abc import Sequence

import numpy as np

from headrace.batch import KvRows, RaggedBatch, ints
from headrace.config import KvConfig


def num_blocks(length: int) -> int:
    """KV blocks of a piece of so many tokens."""
    return -(-length // KvConfig.block_size)


def piece_batch(
    piece: Sequence[int], first: int, end: int, num_logits: int, blocks: int, num_groups: int
) -> RaggedBatch:
    """Tokens `first` to `end` of a piece, whose last `num_logits` rows have logits; the table has
    `blocks` in each group of layers.
    """
    positions, rows = ints(list(range(first, end))), end - first
    logit_rows = ints(list(range(max(0, rows - num_logits), rows)))
    return RaggedBatch(
        tokens=ints(list(piece[first:end])),
        positions=positions,
        row_start=ints([0, rows]),
        context_len=ints([first]),
        scheduled_len=ints([rows]),
        kv=(KvRows(positions, np.arange(blocks, dtype=np.int32)[None]),) * num_groups,
        ancestors=None,
        logit_rows=logit_rows,
        seq_of=ints([0] * len(logit_rows)),
    )
