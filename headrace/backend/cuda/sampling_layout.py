"""Layout of a step's sampling integers: the kernels' input, and their results as records."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace.backend.cuda.kernels import sample_table as table
from headrace.batch import Ints, TokenLogprobs
from headrace.logit_ops import Expand, Expanded, LogitOpResult, SampleOp, SampleResult, Score

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


class PendingOp(NamedTuple):
    op: SampleOp | Expand | Score
    first_sample: int  # -1: the op samples no token
    first_described: int  # first of its rows with log-probabilities; -1: it has no such row


def results_of(
    pending: list[PendingOp], layout: SampleLayout, host: Ints
) -> list[tuple[list[int], LogitOpResult]]:
    """The sampled tokens and the result of each op. A result is None if logits are not finite."""
    samples, described, top_ids, top_logprobs = layout.results(host)
    tokens, path, counts = samples.tolist()
    ranks, logprobs = described[0].tolist(), described[1].view(np.float32).tolist()
    ids, values = top_ids.tolist(), top_logprobs.view(np.float32).tolist()

    results: list[tuple[list[int], LogitOpResult]] = []
    op_number = 0  # counts only the ops that sample
    for op, first_sample, first_described in pending:
        op_path: list[int] = []
        op_tokens: list[int] = []
        if first_sample >= 0:
            op_tokens = tokens[first_sample : first_sample + counts[op_number]]
            op_path = path[first_sample : first_sample + len(op_tokens) - 1]
            op_number += 1

        # Log-probabilities of the root, and of the nodes that the accepted path visits.
        has_result = bool(op_tokens) or isinstance(op, Score)
        rows: list[int] = []
        if first_described >= 0 and has_result:
            rows = [first_described + 1 + node for node in (-1, *op_path)]
        num_top = 0 if isinstance(op, Expand) else max(0, op.num_logprobs)
        scores = [
            TokenLogprobs(logprobs[i], ranks[i], ids[i][:num_top], values[i][:num_top])
            for i in rows
        ]

        is_finite = has_result and all(score.rank for score in scores)
        result = _result(op, op_tokens, op_path, scores) if is_finite else None
        results.append((op_tokens, result))
    return results


def _result(
    op: SampleOp | Expand | Score, tokens: list[int], path: list[int], scores: list[TokenLogprobs]
) -> LogitOpResult:
    if isinstance(op, Score):
        return scores[0]
    return (
        SampleResult(tokens, path, scores) if isinstance(op, SampleOp) else Expanded(tokens, None)
    )
