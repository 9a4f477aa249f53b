"""Block tables as arrays of a batch, and copies of KV between steps."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headrace.backend import Executable
from headrace.batch import Ints, KvRows, RaggedBatch, ints
from headrace.kv.blocks import Table
from headrace.kv.manager import BlockCopy, Copy, KvManager, Tables


def kv_rows(
    tables: Sequence[Tables], written: Sequence[range], block_size: int
) -> tuple[KvRows, ...]:
    """The slots and the block table of each KV group, for `written` positions."""
    return tuple(
        [
            KvRows(slots_of(group_tables, written, block_size), block_table(group_tables))
            for group_tables in zip(*tables, strict=True)
        ]
    )


def slots_of(tables: Sequence[Table], written: Sequence[range], block_size: int) -> Ints:
    """The slots of the written positions, [rows].

    NumPy would not be faster: after a step on a CPU its code has left the caches.
    """
    slots: list[int] = []
    for table, indices in zip(tables, written, strict=True):
        index, end = indices.start, indices.stop
        while index < end:
            offset = index % block_size
            first = table[index // block_size] * block_size + offset
            if index + 1 == end:
                slots.append(first)
                break
            count = min(block_size - offset, end - index)
            slots += range(first, first + count)
            index += count
    return ints(slots)


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
    ends = list(accumulate(len(run.tokens) for run in runs))
    written = [range(run.computed, run.computed + len(run.tokens)) for run in runs]
    return RaggedBatch(
        tokens=ints([token for run in runs for token in run.tokens]),
        positions=ints([position for positions in written for position in positions]),
        row_start=ints([0, *ends]),
        context_len=ints([run.computed for run in runs]),
        scheduled_len=ints([len(run.tokens) for run in runs]),
        kv=kv_rows([run.tables for run in runs], written, block_size),
        ancestors=None,
        logit_rows=ints([end - 1 for end in ends] if logits else []),
        seq_of=ints(list(range(len(runs))) if logits else []),
    )


def prepare_blocks(executable: Executable, kv: KvManager, copies: Sequence[BlockCopy]) -> None:
    """Make the block copies of a step, then load its blocks from the host or the disk."""
    move_slots(executable, kv.slot_copies(copies))
    kv.run_loads()


def move_slots(executable: Executable, moves: Sequence[Copy]) -> None:
    """Copy KV from slot to slot, in order within each group."""
    if not moves:
        return
    for group in {move.group for move in moves}:
        pairs = [(move.source, move.target) for move in moves if move.group == group]
        sources, targets = np.array(pairs, np.int32).T
        executable.move_slots(group, sources, targets)
