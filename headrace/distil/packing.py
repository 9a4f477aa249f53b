"""The order of training: texts packed into rows of a batch, by seed and step alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.record import frozen


@frozen
class Piece:
    """Tokens of a sequence that fit a row of a batch."""

    sequence: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Row = list[Piece]
Batch = list[Row]


def cut(sequences: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Piece]:
    """Cut sequences with these numbers and lengths into pieces of at most `row_length` tokens."""
    return [
        Piece(sequence, start, min(start + row_length, length))
        for sequence, length in zip(sequences, lengths, strict=True)
        for start in range(0, length, row_length)
    ]


def packed(pieces: Sequence[Piece], row_length: int, num_rows: int) -> list[Batch]:
    """Fill batches of `num_rows` rows. Each piece goes into the first open row with room for it.

    The last batch may have fewer rows.
    """
    rows: list[Row] = []
    open_rows: list[tuple[int, Row]] = []  # free tokens, row
    for piece in pieces:
        place = next((i for i, (free, _) in enumerate(open_rows) if free >= len(piece)), None)
        if place is None:
            row: Row = []
            rows.append(row)
            open_rows = [*open_rows[-_OPEN_ROWS:], (row_length, row)]
            place = len(open_rows) - 1
        free, row = open_rows[place]
        row.append(piece)
        open_rows[place] = free - len(piece), row
    return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]


_OPEN_ROWS = 16


class TrainingOrder:
    """The batch of each step: an epoch takes all pieces in an order of its own."""

    def __init__(self, pieces: Sequence[Piece], row_length: int, num_rows: int, seed: int) -> None:
        self._pieces = pieces
        self._row_length, self._num_rows = row_length, num_rows
        self._seed = seed
        self._epoch, self._first_step = -1, 0
        self._batches: list[Batch] = []

    @property
    def num_batches(self) -> int:
        """The number of batches of the first epoch."""
        self.batch(0)
        return len(self._batches)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, from 0."""
        if step < self._first_step:
            self._epoch, self._first_step, self._batches = -1, 0, []
        while step >= self._first_step + len(self._batches):
            self._first_step += len(self._batches)
            self._epoch += 1
            order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._pieces))
            self._batches = self._shuffled(order)
        return self._batches[step - self._first_step]

    def _shuffled(self, order: NDArray[np.int64]) -> list[Batch]:
        return packed([self._pieces[i] for i in order], self._row_length, self._num_rows)
