"""Layout of a step's sampling integers: the kernels' input and their results."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.backend.cuda.kernels import sample_table as table

COLUMNS, OP_COLUMNS, ENTRY_COLUMNS, DESCRIBED_COLUMNS = (
    int(columns.value)
    for columns in (table.COLUMNS, table.OP_COLUMNS, table.ENTRY_COLUMNS, table.DESCRIBED_COLUMNS)
)


class SampleLayout(NamedTuple):
    """Sizes of a step's sampling, rounded up to powers of two. Equal layouts share launches."""

    samples: int  # Rows that tokens are sampled from
    nodes: int  # Max samples of one op
    entries: int
    masks: int
    described: int  # Rows with log-probabilities
    top: int  # Max top log-probabilities of a row
    slots: int  # Rows of the penalty state
    is_adjusted: bool
    is_noisy: bool
    is_filtered: bool

    @property
    def num_ints(self) -> int:
        """Integers of the kernels' input."""
        return sum(rows * columns for rows, columns in self._inputs)

    @property
    def num_results(self) -> int:
        """Integers of the results."""
        return sum(rows * columns for rows, columns in self._results)

    @property
    def _inputs(self) -> list[tuple[int, int]]:
        samples = [
            (self.samples, COLUMNS),
            (self.samples, OP_COLUMNS),
        ]  # the first begins with floats of 8 bytes
        return [*samples, (self.entries, ENTRY_COLUMNS), (self.described, DESCRIBED_COLUMNS)]

    @property
    def _results(self) -> list[tuple[int, int]]:
        return [
            (3, self.samples),
            (2, self.described),
            (self.described, self.top),
            (self.described, self.top),
        ]

    def inputs(self, area: Any) -> list[Any]:
        """The tables of an area: samples [samples, 32], ops [samples, 4], entries
        [entries, 4] and described rows [described, 4].
        """
        return _split(area, self._inputs)

    def results(self, area: Any) -> list[Any]:
        """The results in an area.

        Tokens, paths and counts [3, samples]; ranks and log-probability bits [2,
        described]; then ids and log-probability bits of the top tokens, [described, top]
        each.
        """
        return _split(area, self._results)


def common_layouts(slots: int) -> Iterator[SampleLayout]:
    """Layouts that together need the kernels of most steps without drafts.

    Kernels do not depend on the number of samples, but on the alignment of the parts.
    """
    for samples in (4, 2, 1):
        for described in (0, samples):
            for adjusted, noisy, filtered in (
                (False, False, False),
                (False, True, False),
                (False, True, True),
                (True, False, False),
                (True, True, True),
            ):
                yield SampleLayout(
                    samples=samples,
                    nodes=1,
                    entries=samples if adjusted else 0,
                    masks=0,
                    described=described,
                    top=described and 1,
                    slots=slots,
                    is_adjusted=adjusted,
                    is_noisy=noisy,
                    is_filtered=filtered,
                )


def _split(area: Any, shapes: list[tuple[int, int]]) -> list[Any]:
    parts, first = [], 0
    for rows, columns in shapes:
        parts.append(area[first : first + rows * columns].reshape(rows, columns))
        first += rows * columns
    return parts
