"""From sequences and their blocks to the arrays that a program sees."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headrace.batch import Ints, RaggedBatch
from headrace.kv.blocks import NULL_BLOCK, Table, slots


def ints(values: list[int]) -> Ints:
    """The same as np.array, which takes several times as long for a few numbers."""
    return np.frombuffer(array("i", values), np.int32)


def block_table(tables: Sequence[Table]) -> Ints:  # [sequences, max_blocks]
    """The tables side by side, filled up with zeros."""
    width = max(map(len, tables))
    padded = array("i")
    for table in tables:
        num_null = table.count(NULL_BLOCK) if table[0] == NULL_BLOCK else 0
        # Nobody looks there, but it must be the number of a block: its own, so that nothing of others is ever near.
        padded.extend([table[-1]] * num_null)
        padded.extend(table[num_null:])
        padded.extend([0] * (width - len(table)))
    return np.frombuffer(padded, np.int32).reshape(len(tables), width)


class TokenRun(NamedTuple):
    """Some tokens that follow what has KV already."""

    tokens: list[int]  # at least one
    computed: int
    table: Table  # with slots for them


def batch_of_runs(runs: Sequence[TokenRun], block_size: int, *, logits: bool) -> RaggedBatch:
    """A step of these tokens and no drafts; with `logits`, those of the last row of each run."""
    ends = list(accumulate(len(run.tokens) for run in runs))
    return RaggedBatch(
        tokens=ints([token for run in runs for token in run.tokens]),
        positions=ints([run.computed + i for run in runs for i in range(len(run.tokens))]),
        slots=ints([slot for run in runs for slot in slots(run.table, run.computed, run.computed + len(run.tokens), block_size)]),
        row_start=ints([0, *ends]),
        context_len=ints([run.computed for run in runs]),
        scheduled_len=ints([len(run.tokens) for run in runs]),
        block_table=block_table([run.table for run in runs]),
        ancestors=None,
        logit_rows=ints([end - 1 for end in ends] if logits else []),
        seq_of=ints(list(range(len(runs))) if logits else []),
    )
