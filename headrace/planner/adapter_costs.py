"""Costs of a low-rank adapter that all rows of a step use: two narrow products for a weight."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.program.adapter import LowRank
from headrace.program.op import Kind, Op, StepSize, Value, Weight
from headrace.program.trace import Program
from headrace.record import frozen

RANK_TILE = 16
"""Ranks that kernels compute together (`csrc/adapters.h`, `backend/cuda/kernels/lora.py`)."""


@frozen
class LowRankProducts(Op):
    """scale * up (down x), which is added to the product of a weight. Backends compute it in
    launches of their own, so this op has costs alone.
    """

    x: Value
    out: Value
    """Has as many rows as `x`."""
    down: Weight  # [rank in whole tiles, cols]
    up: Weight  # [rows, rank]

    def flops(self, step: StepSize) -> int:
        numbers = self.down.rows * self.down.cols + self.up.rows * self.up.cols
        return 2 * self.x.num_rows(step) * numbers


def with_low_rank(
    program: Program,
    matrices: Mapping[str, LowRank],
    nbytes: Callable[[LowRank], int],
    kind: Kind,
) -> Program:
    """The lowered program with the costs of an adapter before the op of each weight.

    `nbytes`: of both matrices for a weight, in the backend's memory; `kind`: the number format of
    the products.
    """
    ops: list[Op] = []
    for op in program.ops:
        for weight in op.matrices():
            if weight.name in matrices and op.inputs():
                ops.append(
                    _products(op.inputs()[0], weight.name, matrices[weight.name], nbytes, kind)
                )
        ops.append(op)
    return replace(program, ops=tuple(ops))


def _products(
    x: Value, name: str, matrices: LowRank, nbytes: Callable[[LowRank], int], kind: Kind
) -> LowRankProducts:
    (rank, cols), rows = matrices.down.shape, len(matrices.up)
    # Kernels compute down x in tiles.
    down_rows = -(-rank // RANK_TILE) * RANK_TILE
    total = nbytes(matrices)
    down_bytes = total * cols // (cols + rows)
    return LowRankProducts(
        x=x,
        out=replace(x, width=rows),
        down=_weight(f"{name} down", (down_rows, cols), down_bytes, kind),
        up=_weight(f"{name} up", (rows, rank), total - down_bytes, kind),
    )


def _weight(name: str, shape: tuple[int, int], nbytes: int, kind: Kind) -> Weight:
    rows, cols = shape
    return Weight(name=name, rows=rows, cols=cols, nbytes=nbytes, kind=kind)
