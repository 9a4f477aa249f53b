"""What collectives do with the rows of a rank, over whatever carries them."""

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Ints
from headrace.program.collective import (
    AllGather,
    Collective,
    Columns,
    ColumnsToRows,
    GatherShares,
    OwnedExperts,
    OwnedRows,
    Receive,
    Send,
    row_share,
)

Floats = NDArray[np.float32]


class Carrier(Protocol):
    """Carries rows between ranks. All of them raise RankLostError where another rank does not
    answer.
    """

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        """The numbers of each rank of the stage, which has so many."""

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        """What each rank of the stage has for this one, so many numbers, for what this one has for
        each.
        """

    def send(self, rows: Floats, stage: int) -> None:
        """Rows to the rank with the same share of another stage; they may change afterwards."""

    def receive(self, out: Floats, stage: int) -> None:
        """What that rank sends."""


class Exchange:
    """Runs the collectives of a rank's program: the `ProcessGroup` of a backend."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._tokens: Ints = np.empty(0, np.int32)
        self.waited = 0.0
        """Seconds for which other stages were waited for."""

    def begin(self, tokens: Ints) -> None:
        self._tokens = tokens

    def run(self, op: Collective, out: Floats | None, *inputs: Floats) -> None:
        match op:
            case Send():
                self._carrier.send(inputs[0], op.stage)
            case Receive() if out is not None:
                begun = monotonic()
                self._carrier.receive(out, op.stage)
                self.waited += monotonic() - begun
            case AllGather() if out is not None:
                gathered = self._gather(inputs[0], [last - first for first, last in op.parts])
                for (first, last), rows in reversed(list(zip(op.parts, gathered, strict=True))):
                    out[:, first:last] = rows
            case ColumnsToRows() if out is not None:
                shares = [
                    slice(*row_share(len(out), rank, len(op.parts)))
                    for rank in range(len(op.parts))
                ]
                mine = out[shares[op.rank]]
                sizes = [len(mine) * (last - first) for first, last in op.parts]
                found = self._carrier.all_to_all(
                    [inputs[0][rows].reshape(-1) for rows in shares], sizes
                )
                for (first, last), numbers in zip(op.parts, found, strict=True):
                    mine[:, first:last] = numbers.reshape(len(mine), last - first)
            case GatherShares() if out is not None:
                ends = [row_share(len(out), rank, op.ranks) for rank in range(op.ranks)]
                own = inputs[0][slice(*ends[op.rank])].reshape(-1)
                found = self._carrier.all_gather(
                    own, [(last - first) * out.shape[1] for first, last in ends]
                )
                out[:] = np.concatenate(found).reshape(out.shape)
            case OwnedRows() if out is not None:
                rows = np.stack(self._gather(inputs[0], [op.x.width] * len(op.parts)))
                out[:] = rows[owners(op.parts, self._tokens), np.arange(len(out))]
            case OwnedExperts() if out is not None:
                top_k = inputs[1].shape[1] // 2
                owner = owners(op.parts, inputs[1][:, :top_k])
                rows = np.stack(self._gather(inputs[0], [op.x.width] * len(op.parts)))
                each = rows.reshape(len(op.parts), len(out), top_k, -1)
                out[:] = each[owner, np.arange(len(out))[:, None], np.arange(top_k)].reshape(
                    out.shape
                )
            case _:
                raise NotImplementedError(op.name)

    def _gather(self, rows: Floats, widths: Sequence[int]) -> list[Floats]:
        """The rows [rows, width] of each rank, which has so many columns."""
        found = self._carrier.all_gather(rows.reshape(-1), [len(rows) * width for width in widths])
        return [
            numbers.reshape(len(rows), width) for numbers, width in zip(found, widths, strict=True)
        ]


def owners(parts: Sequence[Columns], numbers: NDArray[np.generic]) -> NDArray[np.intp]:
    """The rank whose part has each number."""
    return np.searchsorted([last for _, last in parts], numbers, side="right")
