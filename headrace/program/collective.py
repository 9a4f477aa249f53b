"""Ops of programs for one of several ranks (headrace/parallel)."""

from headrace.program.moe import Experts
from headrace.program.op import Op, StepSize, Value, Weight
from headrace.program.ops import Norm
from headrace.record import frozen

Columns = tuple[int, int]
"""Columns, tokens or experts: first, last + 1."""
LINK_BYTES = 4


@frozen
class Collective(Op):
    """An op that all ranks of a group run together."""


@frozen
class AllGather(Collective):
    """out = the columns of x of all ranks; `parts` has the columns of each rank"""

    out: Value
    x: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        num_columns = sum(
            end - first for rank, (first, end) in enumerate(self.parts) if rank != self.rank
        )
        return LINK_BYTES * self.out.num_rows(step) * num_columns


@frozen
class EmbedPart(Op):
    """out[t] = weight[token[t] - first], or 0 outside this part of the vocabulary"""

    out: Value
    weight: Weight
    first: int
    vocab: int

    def bytes(self, step: StepSize) -> int:
        return min(step.rows, self.weight.rows) * self.weight.nbytes // self.weight.rows


@frozen
class OwnedRows(Collective):
    """out[t] = x[t] of the rank with token[t]

    Rows are copied and never summed, so their bits do not change.
    """

    out: Value
    x: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        return LINK_BYTES * step.rows * self.out.width * (len(self.parts) - 1)


@frozen
class TakeColumns(Op):
    """out = the columns of x from `first` on"""

    out: Value
    x: Value
    first: int


@frozen
class ColumnsToRows(Collective):
    """out[t] = the columns of x[t] of all ranks, for rows t of this rank"""

    out: Value
    x: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        first, end = row_share(self.out.num_rows(step), self.rank, len(self.parts))
        return LINK_BYTES * (end - first) * (self.out.width - self.x.width)


@frozen
class NormShare(Norm):
    """A norm of this rank's rows (`row_share`)"""

    rank: int = 0
    ranks: int = 1

    def flops(self, step: StepSize) -> int:
        first, end = row_share(self.out.num_rows(step), self.rank, self.ranks)
        return super().flops(step) * (end - first) // max(1, self.out.num_rows(step))


@frozen
class GatherShares(Collective):
    """out[t] = x[t] of the rank that has row t (`row_share`)"""

    out: Value
    x: Value
    rank: int
    ranks: int

    def link_bytes(self, step: StepSize) -> int:
        rows = self.out.num_rows(step)
        first, end = row_share(rows, self.rank, self.ranks)
        return LINK_BYTES * (rows - (end - first)) * self.out.width


def row_share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """A rank's rows: first, last + 1, with at most one more than others."""
    return rows * rank // ranks, rows * (rank + 1) // ranks


@frozen
class ExpertPart(Experts):
    """out[t, choice] = down_e(glu(gate_e x, up_e x)) for this rank's experts, numbered from
    `first` on
    """

    first: int = 0
    num_experts: int = 0

    def distinct_experts(self, rows: int) -> float:
        return len(self.gate) * (1 - (1 - self.top_k / self.num_experts) ** rows)

    def flops(self, step: StepSize) -> int:
        """The expected number for equally likely experts."""
        return super().flops(step) * len(self.gate) // self.num_experts


@frozen
class OwnedExperts(Collective):
    """out[t, choice] = x[t, choice] of the rank that has the chosen expert"""

    out: Value
    x: Value
    routing: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        return LINK_BYTES * self.x.num_rows(step) * self.x.width * (len(self.parts) - 1)


@frozen
class Combine(Op):
    """out[t] = sum of weight * x[t, choice] over the choices of row t, in the order of routing"""

    out: Value
    x: Value
    routing: Value

    def flops(self, step: StepSize) -> int:
        return 2 * self.x.num_rows(step) * self.x.width


@frozen
class Send(Collective):
    """Sends x to the same rank of another stage"""

    x: Value
    stage: int  # destination


@frozen
class Receive(Collective):
    """out = the value from the same rank of another stage"""

    out: Value
    stage: int  # source

    def link_bytes(self, step: StepSize) -> int:
        return LINK_BYTES * self.out.num_rows(step) * self.out.width
