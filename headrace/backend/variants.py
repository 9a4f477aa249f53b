"""Steps of a program and its variants: adapters with weights of their own.

Such an adapter has a program of its own over the same KV, and shares all other weights. A step
runs once for each program that its sequences use. A row has the same bits in any batch, so these
runs have the results of one.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.batch import RaggedBatch, ints, part_of
from headrace.logit_ops import LogitOpResult, StepResult

Rows = NDArray[np.float32]
_Program = TypeVar("_Program")


class GatheredRows(NamedTuple):
    """Results of a run."""

    logits: Rows | None  # [logit rows, vocab]
    hidden: Rows | None  # [logit rows, dim]
    pooled: Rows | None  # [pooled rows, dim]
    taps: Rows | None = None  # [rows, width]


def result_of(
    values: list[LogitOpResult], rows: GatheredRows, *, logits: bool, hidden: bool
) -> StepResult:
    """The result of a launch with the requested rows."""
    return StepResult(
        values=values,
        logits=rows.logits if logits else None,
        hidden=rows.hidden if hidden else None,
        taps=rows.taps if hidden else None,
    )


def sequences_of(batch: RaggedBatch, numbers: Collection[int]) -> dict[int, list[int]]:
    """The sequences of each program, by number of its variant; -1 without a variant."""
    assert batch.adapters is not None
    parts: dict[int, list[int]] = {}
    for sequence, number in enumerate(batch.adapters.tolist()):
        parts.setdefault(number if number in numbers else -1, []).append(sequence)
    return parts


def run_parts(
    batch: RaggedBatch,
    numbers: Mapping[int, _Program],
    run: Callable[[_Program | None, RaggedBatch], GatheredRows],
) -> GatheredRows:
    """Run each part of a batch. `numbers`: the variants by number of the adapter; None is the
    program without a variant.

    The results of a run are valid until the next.
    """
    parts = sequences_of(batch, numbers)
    if len(parts) == 1:
        return run(numbers.get(next(iter(parts))), batch)

    whole: list[Rows | None] = [None] * len(GatheredRows._fields)
    for number, sequences in parts.items():
        part, rows_of_part, logit_rows, pooled_rows = part_of(batch, sequences)
        places = (logit_rows, logit_rows, pooled_rows, rows_of_part)
        num_pooled = 0 if batch.pooled_rows is None else len(batch.pooled_rows)
        sizes = (len(batch.logit_rows), len(batch.logit_rows), num_pooled, len(batch.tokens))
        for i, rows in enumerate(run(numbers.get(number), part)):
            if rows is None:
                continue
            target = whole[i]
            if target is None:
                target = whole[i] = np.empty((sizes[i], rows.shape[1]), np.float32)
            target[places[i]] = rows
    return GatheredRows(*whole)


def with_adapter(batch: RaggedBatch, number: int) -> RaggedBatch:
    """The batch whose sequences all use the adapter `number`."""
    return batch._replace(adapters=ints([number] * len(batch.context_len)))
