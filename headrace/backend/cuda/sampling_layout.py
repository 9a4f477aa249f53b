"""Where the numbers of a step's draws lie: those that the host writes for its kernels, and those
that it reads of them.
"""

from typing import Any, NamedTuple

from headrace.backend.cuda.kernels import sample_table as table

COLUMNS, OP_COLUMNS, ENTRY_COLUMNS, DESCRIBED_COLUMNS = (
    int(columns.value)
    for columns in (table.COLUMNS, table.OP_COLUMNS, table.ENTRY_COLUMNS, table.DESCRIBED_COLUMNS)
)


class SampleLayout(NamedTuple):
    """The sizes of a step's draws, filled up to powers of two, and what they need: steps with the
    same have the same launches.
    """

    draws: int
    """Rows that tokens are drawn from."""
    nodes: int
    """Most of them in one op."""
    entries: int
    masks: int
    described: int
    """Rows of which log-probabilities are wanted."""
    top: int
    """Most of the likeliest tokens of such a row."""
    slots: int
    """Rows of the state of penalties."""
    is_adjusted: bool
    is_noisy: bool
    is_filtered: bool

    @property
    def num_ints(self) -> int:
        """Integers that the host writes."""
        return sum(rows * columns for rows, columns in self._inputs)

    @property
    def num_results(self) -> int:
        """Integers that it reads."""
        return sum(rows * columns for rows, columns in self._results)

    @property
    def _inputs(self) -> list[tuple[int, int]]:
        draws = [
            (self.draws, COLUMNS),
            (self.draws, OP_COLUMNS),
        ]  # the first begins with floats of 8 bytes
        return [*draws, (self.entries, ENTRY_COLUMNS), (self.described, DESCRIBED_COLUMNS)]

    @property
    def _results(self) -> list[tuple[int, int]]:
        return [
            (3, self.draws),
            (2, self.described),
            (self.described, self.top),
            (self.described, self.top),
        ]

    def inputs(self, area: Any) -> list[Any]:
        """The tables of draws [draws, 32], ops [draws, 4], entries [entries, 4] and rows to
        describe [described, 4] in an area.
        """
        return _split(area, self._inputs)

    def results(self, area: Any) -> list[Any]:
        """The results in an area: tokens, paths and counts [3, draws]; ranks and the bits of
        log-probabilities [2, described].

        Then of the likeliest tokens the ids and the bits of log-probabilities, [described, top]
        each.
        """
        return _split(area, self._results)


def _split(area: Any, shapes: list[tuple[int, int]]) -> list[Any]:
    """Arrays of these shapes, one behind the other in an array or a tensor of integers."""
    parts, first = [], 0
    for rows, columns in shapes:
        parts.append(area[first : first + rows * columns].reshape(rows, columns))
        first += rows * columns
    return parts
