"""Block tables as arrays of a batch, and copies of KV between steps."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headrace.backend import Executable
from headrace.batch import Ints, KvRows, RaggedBatch, ints
from headrace.kv.blocks import Table
from headrace.kv.manager import Copy, KvManager, Tables


class WrittenRows(NamedTuple):
    """The places of the rows of a step, which are adjacent in each sequence."""

    seqs: Ints  # [rows] index of the row's sequence
    indices: Ints  # [rows] index of the row's slot in its sequence
    row_start: Ints  # [sequences + 1] first row of each sequence

    @classmethod
    def of(cls, first: Ints, num_rows: list[int]) -> "WrittenRows":
        """The rows of sequences that write `num_rows` slots from `first` on, both [sequences]."""
        num_seqs, total = len(num_rows), sum(num_rows)
        if total == num_seqs:  # the usual case: each sequence has one row
            row_start = np.arange(num_seqs + 1, dtype=np.int32)
            return cls(row_start[:-1], first, row_start)
        row_start = ints([0, *accumulate(num_rows)])
        seqs = np.repeat(np.arange(num_seqs, dtype=np.int32), num_rows)
        indices = np.arange(total, dtype=np.int32) + (first - row_start[:-1])[seqs]
        return cls(seqs, indices, row_start)


def kv_rows(tables: Sequence[Tables], rows: WrittenRows, block_size: int) -> tuple[KvRows, ...]:
    """The slots and the block table of each KV group."""
    blocks, offsets = np.divmod(rows.indices, np.int32(block_size))
    arrays = [block_table(group_tables) for group_tables in zip(*tables, strict=True)]
    return tuple(
        [
            KvRows(array[rows.seqs, blocks] * np.int32(block_size) + offsets, array)
            for array in arrays
        ]
    )


def block_table(tables: Sequence[Table]) -> Ints:
    """The tables, padded with zeros, [sequences, max_blocks]."""
    width = max(map(len, tables))
    num_bytes = width * tables[0].itemsize
    rows = [
        (_without_nulls(table) if table.num_released else table).tobytes().ljust(num_bytes, b"\0")
        for table in tables
    ]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(tables), width)


def _without_nulls(table: Table) -> "array[int]":
    """Replace null blocks by a block of the same sequence: a wrong read must not reach another."""
    return (
        table[: table.num_sink_blocks]
        + array("i", [table[-1]] * table.num_released)
        + table[table.window_start :]
    )


class TokenRun(NamedTuple):
    tokens: list[int]  # at least one
    computed: int
    tables: Tables  # with slots for the tokens


def batch_of_runs(runs: Sequence[TokenRun], block_size: int, *, logits: bool) -> RaggedBatch:
    """A batch without drafts; with `logits`, the last row of each run has logits."""
    context_len = ints([run.computed for run in runs])
    num_rows = [len(run.tokens) for run in runs]
    rows = WrittenRows.of(context_len, num_rows)
    return RaggedBatch(
        tokens=ints([token for run in runs for token in run.tokens]),
        positions=rows.indices,
        row_start=rows.row_start,
        context_len=context_len,
        scheduled_len=ints(num_rows),
        kv=kv_rows([run.tables for run in runs], rows, block_size),
        ancestors=None,
        logit_rows=rows.row_start[1:] - 1 if logits else ints([]),
        seq_of=np.arange(len(runs), dtype=np.int32) if logits else ints([]),
    )


def prepare_blocks(executable: Executable, kv: KvManager, copies: Sequence[Copy]) -> None:
    """Make the block copies of a step, then load its host blocks."""
    move_slots(executable, kv.slot_copies(copies))
    kv.host.run_loads()


def move_slots(executable: Executable, moves: Sequence[Copy]) -> None:
    """Copy KV from slot to slot, in order within each group."""
    if not moves:
        return
    for group in {move.group for move in moves}:
        pairs = [(move.source, move.target) for move in moves if move.group == group]
        sources, targets = np.array(pairs, np.int32).T
        executable.move_slots(group, sources, targets)
