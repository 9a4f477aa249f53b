"""Results of sampling on the device, as records."""

from typing import NamedTuple

import numpy as np

from headrace.backend.cuda.sampling_layout import SampleLayout
from headrace.batch import Ints, TokenLogprobs
from headrace.logit_ops import Expand, Expanded, LogitOpResult, SampleOp, SampleResult, Score


class PendingOp(NamedTuple):
    op: SampleOp | Expand | Score
    first: int
    """-1: the op samples no token."""
    described_rows: int
    """-1: the op reports no log-probabilities."""


def results_of(
    pending: list[PendingOp], layout: SampleLayout, host: Ints
) -> list[tuple[list[int], LogitOpResult]]:
    """The sampled tokens and the result of each op. A result is None if logits are not
    finite.
    """
    samples, described_rows, top_ids, top_logprobs = layout.results(host)
    tokens, path, counts = samples.tolist()
    ranks, logprobs = described_rows[0].tolist(), described_rows[1].view(np.float32).tolist()
    top_tokens, top_values = top_ids.tolist(), top_logprobs.view(np.float32).tolist()
    results: list[tuple[list[int], LogitOpResult]] = []
    op_number = 0
    for op, first, first_row in pending:
        op_path: list[int] = []
        op_tokens: list[int] = []
        if first >= 0:
            op_tokens = tokens[first : first + counts[op_number]]
            op_path = path[first : first + len(op_tokens) - 1]
            op_number += 1
        rows: list[int] = []
        if first_row >= 0:
            visited = [-1, *op_path] if op_tokens or isinstance(op, Score) else []
            rows = [first_row + 1 + node for node in visited]
        num_top = 0 if isinstance(op, Expand) else max(0, op.num_logprobs)
        scores = [
            TokenLogprobs(logprobs[i], ranks[i], top_tokens[i][:num_top], top_values[i][:num_top])
            for i in rows
        ]
        is_finite = all(score.rank for score in scores) and (
            bool(op_tokens) or isinstance(op, Score)
        )
        results.append((op_tokens, _result(op, op_tokens, op_path, scores) if is_finite else None))
    return results


def _result(
    op: SampleOp | Expand | Score, tokens: list[int], path: list[int], scores: list[TokenLogprobs]
) -> LogitOpResult:
    if isinstance(op, Score):
        return scores[0]
    return (
        SampleResult(tokens, path, scores) if isinstance(op, SampleOp) else Expanded(tokens, None)
    )
