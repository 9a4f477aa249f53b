"""The work of attention in one step: which rows see which splits of their context, made on the host
for a persistent kernel.

The keys that a row sees are counted in the order of their positions. Key i is number i % `split` of
its split i // `split`, whatever batch the row is in, so that partial results of splits, merged in
ascending order, have the same bits in every batch. An item is a tile of rows of one sequence and a
range of splits, whose results it merges itself: a tile has one item for all of its splits where
there is other work for the GPU, and else one for each split. Which of both is chosen changes no bit
either, as both merge in the same order.

Draft rows of a tree see other keys at one index: their ancestors. Splits that lie before the tree
are read once for all rows of a tile; in those behind, every draft row is a tile of its own, with
the list of its ancestors (a *path*).
"""

from typing import NamedTuple

from headrace._native import GpuWork
from headrace.batch import Ints, RaggedBatch

FIELDS = 10
"""Of an item: its first row and their number; where its block table begins; the least index of a
row among the keys it sees; the index behind the last key; the first split and the one behind the
last; which of a row's partial results it writes; the index where the tree of the sequence begins,
and where the row's path does.
"""
ROW_FIELDS = 3
"""Of each row: its first partial result, how many it has, and its own index among the keys it sees.
"""


class WorkArrays(NamedTuple):
    """Where the work goes, views of the memory that is copied to the device."""

    # [partials, FIELDS], as many as there is room for partial results of a row: each item has at
    # least one of its own
    items: Ints
    num_items: Ints  # [1]
    rows: Ints  # [rows, ROW_FIELDS], padding rows included
    paths: Ints  # [path entries]


class WorkSize(NamedTuple):
    """What of the arrays is used; the device reads no more."""

    items: int
    paths: int
    partials: int


def least_partials(max_rows: int, max_draft_tokens: int, split: int) -> int:
    """Partial results that any batch of so many rows fits in; more of them let long contexts spread
    over the GPU.

    A row has one, or, in a tree, one before it and one for each split that a path of so many tokens
    touches.
    """
    return max_rows * (2 + -(-max_draft_tokens // split)) if max_draft_tokens else max_rows


def build_work(
    batch: RaggedBatch,
    work: GpuWork,
    table_offset: int,
    table_stride: int,
    out: WorkArrays,
    path_offset: int = 0,
) -> WorkSize:
    """The items of a batch, the longest first, and the records of its rows; padding rows have no
    partial results.

    The block table of sequence b begins at `table_offset + b * table_stride`; items name paths by
    their places behind `path_offset`. Raises ValueError where the arrays are too small.
    """
    of_batch = batch.row_start, batch.context_len, batch.scheduled_len, batch.ancestors
    return WorkSize(*work.build(*of_batch, table_offset, table_stride, path_offset, *out))
