"""Shapes that steps are rounded up to, so that a few lists of launches, or graphs, serve
all steps.
"""

from typing import NamedTuple

from headrace.batch import RaggedBatch
from headrace.program.op import RowKind

Rows = dict[RowKind, int]
"""Number of rows of each kind."""

# (max rows, multiple) of shapes; above the last, multiples of 256
_STEPS = ((16, 4), (32, 8), (64, 16), (128, 32), (512, 64))


MAX_GRAPH_ROWS = 256
_FEW_ROWS = 512
_SMALL_ROWS = 16
"""A prompt's rest, which small tiles serve as well."""


class StepShape(NamedTuple):
    """Rows that a step has room for. The rest is padding, which no row sees."""

    rows: int
    logit_rows: int
    pooled_rows: int
    has_adapters: bool
    # room for the partial results of draft trees; always in small steps
    has_trees: bool = True

    @property
    def counts(self) -> Rows:
        return {
            "step": self.rows,
            "gathered": self.logit_rows + self.pooled_rows,
            "logit": self.logit_rows,
            "pooled": self.pooled_rows,
        }

    @property
    def is_prefill(self) -> bool:
        """Whether some rows have no logits, unlike in decoding and draft trees."""
        return self.rows > _SMALL_ROWS and (
            self.logit_rows < self.rows or self.rows > MAX_GRAPH_ROWS
        )


def shape_of(batch: RaggedBatch) -> StepShape:
    pooled = 0 if batch.pooled_rows is None else len(batch.pooled_rows)
    rows, logit_rows, pooled_rows = (
        round_up(n) if n else 0 for n in (len(batch.tokens), len(batch.logit_rows), pooled)
    )
    has_adapters = batch.adapters is not None and bool((batch.adapters >= 0).any())
    return StepShape(
        rows=rows,
        logit_rows=logit_rows,
        pooled_rows=pooled_rows,
        has_adapters=has_adapters,
        has_trees=rows <= _FEW_ROWS or batch.ancestors is not None,
    )


def decoding(rows: int) -> StepShape:
    """Shape of steps whose rows all have logits: plain decoding, and draft trees."""
    return StepShape(rows=rows, logit_rows=rows, pooled_rows=0, has_adapters=False, has_trees=True)


def prefill(rows: int, logit_rows: int) -> StepShape:
    return StepShape(
        rows=round_up(rows),
        logit_rows=round_up(logit_rows),
        pooled_rows=0,
        has_adapters=False,
        has_trees=rows <= _FEW_ROWS,
    )


def graph_rows(max_rows: int) -> list[int]:
    """Rows of the steps with graphs, largest first."""
    return shape_rows(min(max_rows, MAX_GRAPH_ROWS))


def shape_rows(max_rows: int) -> list[int]:
    """Rows of all shapes, largest first."""
    return sorted({round_up(rows) for rows in range(1, round_up(max_rows) + 1)}, reverse=True)


def round_up(rows: int) -> int:
    """Smallest shape for `rows`: 1, 2, 4, 8, then steps that add an eighth to a half."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = next((step for max_rows, step in _STEPS if rows <= max_rows), 256)
    return -(-rows // step) * step
