"""The work of attention in one step: which rows see which splits of their context, made on the host for a persistent kernel.

The keys that a row sees are counted in the order of their positions. Key i is number i % `split` of its split i // `split`, whatever
batch the row is in, so that partial results of splits, merged in ascending order, have the same bits in every batch. An item is a tile
of rows of one sequence and a range of splits, whose results it merges itself: a tile has one item for all of its splits where there is
other work for the GPU, and else one for each split. Which of both is chosen changes no bit either, as both merge in the same order.

Draft rows of a tree see other keys at one index: their ancestors. Splits that lie before the tree are read once for all rows of a tile;
in those behind, every draft row is a tile of its own, with the list of its ancestors (a *path*).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Ints, RaggedBatch
from headrace.record import frozen

FIRST_ROW, NUM_ROWS, TABLE, LOW, END, BEGIN, STOP, ORDINAL, BASE, PATH = range(10)
"""Fields of an item: its first row and their number; where its block table begins; the least index of a row among the keys it sees; the
index behind the last key; the first split and the one behind the last; which of a row's partial results it writes; the index where the
tree of the sequence begins, and where the row's path does."""
FIELDS = 10
ROW_FIELDS = 3
"""Of each row: its first partial result, how many it has, and its own index among the keys it sees."""
_NO_TREE = 2**31 - 1


@frozen
class WorkShape:
    """What decides which work there is, besides the batch."""

    rows_per_tile: int  # query rows
    units_per_item: int  # KV heads, times the tiles that the query heads of each need
    programs: int  # of the persistent kernel
    split: int  # keys, a power of two
    window: int = 0
    num_sink_tokens: int = 0


class WorkArrays(NamedTuple):
    """Where the work goes, views of the memory that is copied to the device."""

    items: Ints  # [partials, FIELDS], as many as there is room for partial results of a row: each item has at least one of its own
    num_items: Ints  # [1]
    rows: Ints  # [rows, ROW_FIELDS], padding rows included
    paths: Ints  # [path entries]


class WorkSize(NamedTuple):
    """What of the arrays is used; the device reads no more."""

    items: int
    paths: int
    partials: int


def least_partials(max_rows: int, max_draft_tokens: int, split: int) -> int:
    """Partial results that any batch of so many rows fits in; more of them let long contexts spread over the GPU.

    A row has one, or, in a tree, one before it and one for each split that a path of so many tokens touches.
    """
    return max_rows * (2 + -(-max_draft_tokens // split)) if max_draft_tokens else max_rows


def build_work(batch: RaggedBatch, shape: WorkShape, table_offset: int, table_stride: int, out: WorkArrays) -> WorkSize:
    """The items of a batch, the longest first, and the records of its rows; padding rows have no partial results.

    The block table of sequence b begins at `table_offset + b * table_stride`. Raises ValueError where the arrays are too small.
    """
    visible, is_tree = _visible(batch)
    tables = np.arange(table_offset, table_offset + len(batch.context_len) * table_stride, table_stride, dtype=np.int32)
    segments, num_paths = _chains(batch, is_tree, tables, shape), 0
    if is_tree is not None:
        more, num_paths = _trees(batch, np.flatnonzero(is_tree).tolist(), tables, visible, shape, out.paths, len(segments))
        segments = np.concatenate([segments, np.array(more, np.int32)])
    num_splits = _num_splits(segments, shape)
    counts = _divided(segments, num_splits, shape, len(out.items))
    num_partials = _fill_rows(segments, counts, visible, out.rows)
    if num_partials > len(out.items):
        raise ValueError(f"a step has {num_partials} partial results of attention, and there is room for {len(out.items)}")
    num_items = _fill_items(segments, num_splits, counts, shape, out.items)
    out.num_items[0] = num_items
    return WorkSize(num_items, num_paths, num_partials)


def _visible(batch: RaggedBatch) -> tuple[Ints, NDArray[np.bool] | None]:
    """Each row's own index among the keys that it sees, and which sequences have a tree; None: none has."""
    starts, context = batch.row_start, batch.context_len
    visible = np.arange(starts[-1], dtype=np.int32)
    visible += (context - starts[:-1]).repeat(starts[1:] - starts[:-1])
    if batch.ancestors is None:
        return visible, None
    depths = np.bitwise_count(batch.ancestors).sum(axis=1, dtype=np.int32)
    drafts = np.flatnonzero(depths)
    owner = np.searchsorted(starts, drafts, side="right") - 1
    index = context[owner] + batch.scheduled_len[owner] - 1 + depths[drafts]
    is_tree = np.zeros(len(context), bool)
    is_tree[owner[index != visible[drafts]]] = True  # the draft rows of a chain see all rows before them
    visible[drafts] = index
    return visible, is_tree if is_tree.any() else None


def _chains(batch: RaggedBatch, is_tree: NDArray[np.bool] | None, tables: Ints, shape: WorkShape) -> Ints:
    """Items of the sequences without a tree, not divided yet: each tile of rows with all of its splits."""
    first, low, num = batch.row_start[:-1], batch.context_len, batch.row_start[1:] - batch.row_start[:-1]
    if is_tree is not None:
        first, low, num, tables = first[~is_tree], low[~is_tree], num[~is_tree], tables[~is_tree]
    if len(num) and num.max() > shape.rows_per_tile:
        tiles = -(-num // shape.rows_per_tile)
        seq = np.repeat(np.arange(len(tiles)), tiles)
        skipped = (np.arange(len(seq)) - (np.cumsum(tiles) - tiles)[seq]) * shape.rows_per_tile
        first, low, tables = first[seq] + skipped, low[seq] + skipped, tables[seq]
        num = np.minimum(num[seq] - skipped, shape.rows_per_tile)
    segments = np.zeros((len(num), FIELDS), np.int32)
    columns = segments.T
    columns[FIRST_ROW], columns[NUM_ROWS], columns[TABLE], columns[LOW], columns[END] = first, num, tables, low, low + num
    columns[STOP] = (columns[END] - 1) // shape.split + 1
    columns[BASE] = _NO_TREE
    if shape.window and not shape.num_sink_tokens:
        columns[BEGIN] = np.maximum(low - (shape.window - 1), 0) // shape.split
    return segments


def _trees(
    batch: RaggedBatch, seqs: list[int], tables: Ints, visible: Ints, shape: WorkShape, paths: Ints, num_before: int
) -> tuple[list[list[int]], int]:
    """Items of sequences with trees, and the path entries used: of each tile the splits before the tree, then those behind it.

    Until it is known into how many items the former are divided, ORDINAL of the latter is the number of the former, counted from 1.
    """
    assert batch.ancestors is not None
    split, segments, used = shape.split, list[list[int]](), 0

    def first_split(index: int) -> int:
        return max(0, index - shape.window + 1) // split if shape.window and not shape.num_sink_tokens else 0

    for seq in seqs:
        start, end, num_known = int(batch.row_start[seq]), int(batch.row_start[seq + 1]), int(batch.scheduled_len[seq])
        base, table = int(batch.context_len[seq]) + num_known, int(tables[seq])
        for first in range(start, end, shape.rows_per_tile):
            last = min(first + shape.rows_per_tile, end)
            known = min(last, start + num_known)  # behind the last known row of the tile
            shared, before = base // split if known < last else 0, 0
            low = int(visible[first:last].min())
            if first_split(low) < shared:
                segments.append([first, last - first, table, low, shared * split, first_split(low), shared, 0, _NO_TREE, 0])
                before = num_before + len(segments)
            low, top = int(visible[first]), int(visible[known - 1])
            if first < known and max(shared, first_split(low)) <= top // split:
                begin = max(shared, first_split(low))
                segments.append([first, known - first, table, low, top + 1, begin, top // split + 1, before, _NO_TREE, 0])
            for row in range(max(first, known), last):
                index, nodes = int(visible[row]), _nodes(batch.ancestors[row])
                if used + len(nodes) > len(paths):
                    raise ValueError(f"the draft rows of a step have more than {len(paths)} ancestors")
                paths[used : used + len(nodes)] = nodes
                begin = max(shared, first_split(index))
                segments.append([row, 1, table, index, index + 1, begin, index // split + 1, before, base, used])
                used += len(nodes)
    return segments, used


def _nodes(words: NDArray[np.uint64]) -> list[int]:
    """The draft rows whose bits are set, ascending: a row's ancestors from the root down, and itself."""
    return [64 * w + i for w, word in enumerate(words.tolist()) for i in range(64) if word >> i & 1]


def _num_splits(segments: Ints, shape: WorkShape) -> Ints:
    """Splits of each segment that its rows see anything of."""
    begin, stop = segments[:, BEGIN], segments[:, STOP]
    if not shape.num_sink_tokens:
        return stop - begin
    sinks, window = _seen_splits(segments, shape)
    return np.maximum(np.minimum(sinks, stop) - begin, 0) + np.maximum(stop - np.maximum(begin, window), 0)


def _seen_splits(segments: Ints, shape: WorkShape) -> tuple[Ints, Ints]:
    """The split behind the last of the sinks, and the one that the window of the first row begins in, which is not before that."""
    window = np.maximum(segments[:, LOW] - (shape.window - 1), 0) // shape.split
    return np.minimum(-(-shape.num_sink_tokens // shape.split), window), window


def _divided(segments: Ints, num_splits: Ints, shape: WorkShape, capacity: int) -> Ints | None:
    """Items of each segment, None: one of each. It has one for each split where it would take a program longer than all take all work.

    Where there is no room for so many partial results, those that need the most stay whole.
    """
    limit = max(1, int(num_splits.sum()) * shape.units_per_item // shape.programs)
    behind = segments[:, ORDINAL]
    divided = (num_splits > limit) | (behind > 0)
    if not divided.any():
        return None
    counts = np.where(divided, num_splits, 1)
    rows = segments[:, NUM_ROWS]
    over = int(counts @ rows) - capacity
    if over > 0:
        spare = np.where(behind > 0, 0, (counts - 1) * rows)
        for segment in (-spare).argsort(kind="stable").tolist():
            if over > 0 and spare[segment]:
                over -= int(spare[segment])
                counts[segment] = 1
    behind[behind > 0] = counts[behind[behind > 0] - 1]
    return counts


def _fill_rows(segments: Ints, counts: Ints | None, visible: Ints, out: Ints) -> int:
    """Write the records of the rows, and return how many partial results they have."""
    num_rows = len(visible)
    own = out[:num_rows]
    out[num_rows:] = 0
    own[:, 2] = visible
    rows = segments[:, NUM_ROWS]
    if int(rows.sum()) == num_rows and (counts is None or (segments[1:, FIRST_ROW] > segments[:-1, FIRST_ROW]).all()):
        partials = 1 if counts is None else counts.repeat(rows)
    else:  # rows of trees have several tiles
        partials = np.zeros(num_rows, np.int32)
        for first, num, count in zip(
            segments[:, FIRST_ROW].tolist(), rows.tolist(), [1] * len(rows) if counts is None else counts.tolist(), strict=True
        ):
            partials[first : first + num] += count
    own[:, 1] = partials
    ends = own[:, 1].cumsum()
    np.subtract(ends, partials, out=own[:, 0], casting="unsafe")
    return int(ends[-1])


def _fill_items(segments: Ints, num_splits: Ints, counts: Ints | None, shape: WorkShape, out: Ints) -> int:
    """Write the items that the segments are divided into, the longest first, so that programs end together; return their number."""
    if counts is None:
        segments.take((-num_splits).argsort(kind="stable"), axis=0, out=out[: len(segments)], mode="clip")
        return len(segments)
    lengths = np.where(counts > 1, 1, num_splits)
    order = (-lengths).argsort(kind="stable")
    ordered = counts[order]
    source = order.repeat(ordered)
    number = np.arange(len(source)) - (ordered.cumsum() - ordered).repeat(ordered)
    items = out[: len(source)]
    segments.take(source, axis=0, out=items, mode="clip")
    split = items[:, BEGIN] + number
    if shape.num_sink_tokens:
        sinks, window = _seen_splits(items, shape)
        num_sinks = np.maximum(sinks - items[:, BEGIN], 0)
        split = np.where(number < num_sinks, split, np.maximum(items[:, BEGIN], window) + number - num_sinks)
    divided = ordered.repeat(ordered) > 1
    items[:, ORDINAL] += number
    items[:, BEGIN] = np.where(divided, split, items[:, BEGIN])
    items[:, STOP] = np.where(divided, split + 1, items[:, STOP])
    return len(source)
