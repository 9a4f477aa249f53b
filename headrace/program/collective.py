"""The ops by which ranks exchange rows; what they move over a link is said beside them."""

from headrace.program.moe import Experts
from headrace.program.op import Op, StepSize, Value, Weight
from headrace.program.ops import Norm
from headrace.record import frozen

Columns = tuple[int, int]
"""The first column of a part, and the one behind its last."""
LINK_BYTES = 4
"""Of a number that ranks exchange: activations are float32."""


@frozen
class Collective(Op):
    """Base of the ops that ranks run together. All of a group run the same ones, in the same
    order.
    """


@frozen
class AllGather(Collective):
    """out = the columns of x of all ranks; `parts` says where those of each lie. Where two ranks
    have a column it is the first one's.
    """

    out: Value
    x: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        others = sum(
            last - first for rank, (first, last) in enumerate(self.parts) if rank != self.rank
        )
        return LINK_BYTES * self.out.num_rows(step) * others


@frozen
class EmbedPart(Op):
    """out[t] = weight[token[t] - first], for tokens of this rank's part of the vocabulary; 0 for
    others.
    """

    out: Value
    weight: Weight
    first: int
    vocab: int
    """Tokens of the whole vocabulary."""

    def bytes(self, step: StepSize) -> int:
        return min(step.rows, self.weight.rows) * self.weight.nbytes // self.weight.rows


@frozen
class OwnedRows(Collective):
    """out[t] = x[t] of the rank whose part of the vocabulary has token[t]: a row is taken from its
    owner and never summed.
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
    """out[t] = the columns of x[t] of all ranks, for the rows t that are this rank's (`row_share`);
    other rows mean nothing.
    """

    out: Value
    x: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        first, last = row_share(self.out.num_rows(step), self.rank, len(self.parts))
        return LINK_BYTES * (last - first) * (self.out.width - self.x.width)


@frozen
class NormShare(Norm):
    """A norm of the rows that are this rank's."""

    rank: int = 0
    ranks: int = 1

    def flops(self, step: StepSize) -> int:
        first, last = row_share(self.out.num_rows(step), self.rank, self.ranks)
        return super().flops(step) * (last - first) // max(1, self.out.num_rows(step))


@frozen
class GatherShares(Collective):
    """out[t] = x[t] of the rank whose row t is."""

    out: Value
    x: Value
    rank: int
    ranks: int

    def link_bytes(self, step: StepSize) -> int:
        rows = self.out.num_rows(step)
        first, last = row_share(rows, self.rank, self.ranks)
        return LINK_BYTES * (rows - (last - first)) * self.out.width


def row_share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of so many rows that are a rank's, and the one behind its last: as many as others
    have, or one more.
    """
    return rows * rank // ranks, rows * (rank + 1) // ranks


@frozen
class ExpertPart(Experts):
    """out[t, choice] = down_e(glu(gate_e x, up_e x)) of the experts e of row t that are here, from
    number `first` on.

    What is there of experts that are elsewhere means nothing.
    """

    first: int = 0
    num_experts: int = 0
    """Of all ranks."""

    def distinct_experts(self, rows: int) -> float:
        return len(self.gate) * (1 - (1 - self.top_k / self.num_experts) ** rows)

    def flops(self, step: StepSize) -> int:
        """In the mean, where every row is as likely to go to any expert."""
        return super().flops(step) * len(self.gate) // self.num_experts


@frozen
class OwnedExperts(Collective):
    """out[t, choice] = x[t, choice] of the rank that has the expert which is row t's choice."""

    out: Value
    x: Value
    routing: Value
    rank: int
    parts: tuple[Columns, ...]

    def link_bytes(self, step: StepSize) -> int:
        return LINK_BYTES * self.x.num_rows(step) * self.x.width * (len(self.parts) - 1)


@frozen
class Combine(Op):
    """out[t] = sum over the choices of row t, in the order of its routing, of weight * x[t,
    choice]
    """

    out: Value
    x: Value
    routing: Value

    def flops(self, step: StepSize) -> int:
        return 2 * self.x.num_rows(step) * self.x.width


@frozen
class Send(Collective):
    """x goes to the rank of this number of the next stage."""

    x: Value
    stage: int
    """That it goes to."""


@frozen
class Receive(Collective):
    """out = what the rank of this number of the stage before has sent."""

    out: Value
    stage: int
    """That it comes from."""

    def link_bytes(self, step: StepSize) -> int:
        return LINK_BYTES * self.out.num_rows(step) * self.out.width
