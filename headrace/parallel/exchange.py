"""What collectives do with the rows of a rank, over whatever carries them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Ints
from headrace.program.collective import AllGather, Collective, Columns, OwnedExperts, OwnedRows, Receive, Send

Floats = NDArray[np.float32]


class Carrier(Protocol):
    """Carries rows between ranks. All of them raise RankLostError where another rank does not answer."""

    def all_gather(self, rows: Floats, widths: Sequence[int]) -> list[Floats]:
        """The rows [rows, width] of each rank of the stage, which has so many columns."""

    def send(self, rows: Floats, stage: int) -> None:
        """Rows to the rank with the same share of another stage; they may change afterwards."""

    def receive(self, out: Floats, stage: int) -> None:
        """What that rank sends."""


class Exchange:
    """Runs the collectives of a rank's program: the `Links` of a backend."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._tokens: Ints = np.empty(0, np.int32)

    def begin(self, tokens: Ints) -> None:
        self._tokens = tokens

    def run(self, op: Collective, out: Floats | None, *inputs: Floats) -> None:
        match op:
            case Send():
                self._carrier.send(inputs[0], op.stage)
            case Receive() if out is not None:
                self._carrier.receive(out, op.stage)
            case AllGather() if out is not None:
                widths = [last - first for first, last in op.parts]
                for (first, last), rows in reversed(list(zip(op.parts, self._carrier.all_gather(inputs[0], widths), strict=True))):
                    out[:, first:last] = rows
            case OwnedRows() if out is not None:
                rows = np.stack(self._carrier.all_gather(inputs[0], [op.x.width] * len(op.parts)))
                out[:] = rows[owners(op.parts, self._tokens), np.arange(len(out))]
            case OwnedExperts() if out is not None:
                top_k = inputs[1].shape[1] // 2
                owner = owners(op.parts, inputs[1][:, :top_k])
                rows = np.stack(self._carrier.all_gather(inputs[0], [op.x.width] * len(op.parts)))
                each = rows.reshape(len(op.parts), len(out), top_k, -1)
                out[:] = each[owner, np.arange(len(out))[:, None], np.arange(top_k)].reshape(out.shape)
            case _:
                raise NotImplementedError(op.name)


def owners(parts: Sequence[Columns], numbers: NDArray[np.generic]) -> NDArray[np.intp]:
    """The rank whose part has each number."""
    return np.searchsorted([last for _, last in parts], numbers, side="right")
