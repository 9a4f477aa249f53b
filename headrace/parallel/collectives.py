"""Collective ops of a rank's program."""

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


class Transport(Protocol):
    """Carries rows between ranks. Raises RankLostError if a rank does not respond."""

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        """Return the numbers of each rank of the stage; `sizes` are their counts."""

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        """Send a piece to each rank of the stage; return the pieces, of `sizes`."""

    def send(self, rows: Floats, stage: int) -> None:
        """Send a copy of rows to the rank with this share in another stage."""

    def receive(self, out: Floats, stage: int) -> None: ...


class Collectives:
    """The `ProcessGroup` of a backend."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tokens: Ints = np.empty(0, np.int32)
        self.wait_seconds = 0.0

    def begin(self, tokens: Ints) -> None:
        self._tokens = tokens

    def run(self, op: Collective, out: Floats | None, *inputs: Floats) -> None:
        match op:
            case Send():
                self._transport.send(inputs[0], op.stage)
            case Receive() if out is not None:
                start = monotonic()
                self._transport.receive(out, op.stage)
                self.wait_seconds += monotonic() - start
            case AllGather() if out is not None:
                gathered = self._gather(inputs[0], [last - first for first, last in op.parts])
                # Several ranks may have the same KV head: the first of them is written last.
                for (first, last), rows in reversed(list(zip(op.parts, gathered, strict=True))):
                    out[:, first:last] = rows
            case ColumnsToRows() if out is not None:
                self._columns_to_rows(op, out, inputs[0])
            case GatherShares() if out is not None:
                bounds = [row_share(len(out), rank, op.ranks) for rank in range(op.ranks)]
                own_rows = inputs[0][slice(*bounds[op.rank])].reshape(-1)
                sizes = [(last - first) * out.shape[1] for first, last in bounds]
                gathered = self._transport.all_gather(own_rows, sizes)
                out[:] = np.concatenate(gathered).reshape(out.shape)
            case OwnedRows() if out is not None:
                rows = np.stack(self._gather(inputs[0], [op.x.width] * len(op.parts)))
                out[:] = rows[owners(op.parts, self._tokens), np.arange(len(out))]
            case OwnedExperts() if out is not None:
                self._owned_experts(op, out, inputs[0], inputs[1])
            case _:
                raise NotImplementedError(op.name)

    def _columns_to_rows(self, op: ColumnsToRows, out: Floats, columns: Floats) -> None:
        ranks = range(len(op.parts))
        shares = [slice(*row_share(len(out), rank, len(op.parts))) for rank in ranks]
        own_rows = out[shares[op.rank]]
        sizes = [len(own_rows) * (last - first) for first, last in op.parts]
        pieces = [columns[share].reshape(-1) for share in shares]
        received = self._transport.all_to_all(pieces, sizes)
        for (first, last), numbers in zip(op.parts, received, strict=True):
            own_rows[:, first:last] = numbers.reshape(len(own_rows), last - first)

    def _owned_experts(self, op: OwnedExperts, out: Floats, rows: Floats, routing: Floats) -> None:
        top_k = routing.shape[1] // 2
        owner = owners(op.parts, routing[:, :top_k])  # [rows, top_k]
        gathered = np.stack(self._gather(rows, [op.x.width] * len(op.parts)))
        by_expert = gathered.reshape(len(op.parts), len(out), top_k, op.x.width // top_k)
        owned = by_expert[owner, np.arange(len(out))[:, None], np.arange(top_k)]
        out[:] = owned.reshape(out.shape)

    def _gather(self, rows: Floats, widths: Sequence[int]) -> list[Floats]:
        gathered = self._transport.all_gather(
            rows.reshape(-1), [len(rows) * width for width in widths]
        )
        return [
            numbers.reshape(len(rows), width)
            for numbers, width in zip(gathered, widths, strict=True)
        ]


def owners(parts: Sequence[Columns], numbers: NDArray[np.generic]) -> NDArray[np.intp]:
    return np.searchsorted([last for _, last in parts], numbers, side="right")
