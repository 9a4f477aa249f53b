"""Attention work of one step: the tiles of rows and splits of context that a persistent
kernel processes.

Key i of a row is number i % `split` of split i // `split` in every batch, and partial
results merge in ascending order. So the bits of a row depend neither on its batch nor on
the grouping of splits.

An item is a tile of rows of one sequence and a range of splits: one split if the GPU
lacks other work, else all.

In a draft tree, rows see different ancestors at one index. A tile reads the splits before
the tree for all rows. In later splits each draft row is its own tile, with a list of its
ancestors (a *path*).
"""

from typing import NamedTuple

from headrace._native import GpuWork
from headrace.batch import Ints, RaggedBatch

FIELDS = 10
"""Integers of an item, in order: first row, number of rows, start of the block table, min
index of a row among its keys, end of the keys, first split, end of the splits, partial
result, index where the tree begins, start of the path.
"""
NO_TREE = 2**31 - 1
"""Index where the tree of an item without a tree begins."""
ROW_FIELDS = 3
"""Integers of a row: first partial result, number of partial results, index among its keys."""


class WorkArrays(NamedTuple):
    """Output arrays of `build_work`, views of the memory that is copied to the device."""

    items: Ints  # [partials, FIELDS]: each item has at least one partial result
    num_items: Ints  # [1]
    rows: Ints  # [rows, ROW_FIELDS], padding rows included
    paths: Ints  # [path entries]


class WorkSize(NamedTuple):
    """Used sizes of the arrays."""

    items: int
    paths: int
    partials: int


def min_partials(max_rows: int, max_draft_tokens: int, split: int) -> int:
    """Min room for the partial results of any batch with `max_rows` rows."""
    return max_rows * (2 + -(-max_draft_tokens // split)) if max_draft_tokens else max_rows


def build_work(
    batch: RaggedBatch,
    work: GpuWork,
    table_offset: int,
    table_stride: int,
    out: WorkArrays,
    path_offset: int = 0,
) -> WorkSize:
    """Write the items of a batch, longest first, and the records of its rows.

    The block table of sequence b begins at `table_offset + b * table_stride`, the array
    of paths at `path_offset`. Raises ValueError if an array is too small.
    """
    of_batch = batch.row_start, batch.context_len, batch.scheduled_len, batch.ancestors
    return WorkSize(*work.build(*of_batch, table_offset, table_stride, path_offset, *out))
