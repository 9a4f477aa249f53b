"""From sequences and their blocks to the arrays that a program sees."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headrace.backend import Executable
from headrace.batch import Ints, KvRows, RaggedBatch, ints
from headrace.kv.blocks import Table
from headrace.kv.manager import Copy, KvManager, Tables


def kv_rows(
    tables: Sequence[Tables], written: Sequence[range], block_size: int
) -> tuple[KvRows, ...]:
    """Slots and block table of each group for sequences that write these of their tokens."""
    return tuple(
        KvRows(slots_of(group, written, block_size), block_table(group))
        for group in zip(*tables, strict=True)
    )


def slots_of(tables: Sequence[Table], written: Sequence[range], block_size: int) -> Ints:  # [rows]
    """The slots of these tokens of each table."""
    slots: list[int] = []
    for table, indices in zip(tables, written, strict=True):
        slots += [table[index // block_size] * block_size + index % block_size for index in indices]
    return ints(slots)


def block_table(tables: Sequence[Table]) -> Ints:  # [sequences, max_blocks]
    """The tables side by side, filled up with zeros."""
    width = max(map(len, tables))
    rows = [
        (_with_numbers(table) if table.num_released else table)
        .tobytes()
        .ljust(width * table.itemsize, b"\0")
        for table in tables
    ]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(tables), width)


def _with_numbers(table: Table) -> "array[int]":
    """A table whose null blocks have a number: no row looks there, but it is one of its own, so
    that nothing of others is ever near.
    """
    return (
        table[: table.num_sink_blocks]
        + array("i", [table[-1]] * table.num_released)
        + table[table.window_start :]
    )


class TokenRun(NamedTuple):
    """Some tokens that follow what has KV already."""

    tokens: list[int]  # at least one
    computed: int
    tables: Tables  # with slots for them


def batch_of_runs(runs: Sequence[TokenRun], block_size: int, *, logits: bool) -> RaggedBatch:
    """A step of these tokens and no drafts; with `logits`, those of the last row of each run."""
    ends = list(accumulate(len(run.tokens) for run in runs))
    return RaggedBatch(
        tokens=ints([token for run in runs for token in run.tokens]),
        positions=ints([run.computed + i for run in runs for i in range(len(run.tokens))]),
        row_start=ints([0, *ends]),
        context_len=ints([run.computed for run in runs]),
        scheduled_len=ints([len(run.tokens) for run in runs]),
        kv=kv_rows(
            [run.tables for run in runs],
            [range(run.computed, run.computed + len(run.tokens)) for run in runs],
            block_size,
        ),
        ancestors=None,
        logit_rows=ints([end - 1 for end in ends] if logits else []),
        seq_of=ints(list(range(len(runs))) if logits else []),
    )


def prepare_blocks(executable: Executable, kv: KvManager, copies: Sequence[Copy]) -> None:
    """Make the copies of blocks that a step begins with, and bring back what it finds in the host's
    memory.
    """
    move_slots(executable, kv.slots_of(copies))
    kv.host.load_blocks()


def move_slots(executable: Executable, moves: Sequence[Copy]) -> None:
    """Copy KV from slot to slot, in order."""
    for group in {move.group for move in moves} if moves else ():
        pairs = [(source, target) for at, source, target in moves if at == group]
        executable.move_slots(group, *np.array(pairs, np.int32).T)
