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
    described: int
    """-1: the op reports no log-probabilities."""


def results_of(
    pending: list[PendingOp], layout: SampleLayout, host: Ints
) -> list[tuple[list[int], LogitOpResult]]:
    """The sampled tokens and the result of each op. A result is None if logits are not
    finite.
    """
    drawn, described, top_ids, top_logprobs = layout.results(host)
    tokens, path, counts = drawn.tolist()
    ranks, logprobs = described[0].tolist(), described[1].view(np.float32).tolist()
    ids, of_ids = top_ids.tolist(), top_logprobs.view(np.float32).tolist()
    results: list[tuple[list[int], LogitOpResult]] = []
    number = 0
    for op, first, first_described in pending:
        its_path: list[int] = []
        its_tokens: list[int] = []
        if first >= 0:
            its_tokens = tokens[first : first + counts[number]]
            its_path = path[first : first + len(its_tokens) - 1]
            number += 1
        rows: list[int] = []
        if first_described >= 0:
            visited = [-1, *its_path] if its_tokens or isinstance(op, Score) else []
            rows = [first_described + 1 + node for node in visited]
        num_top = 0 if isinstance(op, Expand) else max(0, op.num_logprobs)
        scores = [
            TokenLogprobs(logprobs[i], ranks[i], ids[i][:num_top], of_ids[i][:num_top])
            for i in rows
        ]
        is_finite = all(score.rank for score in scores) and (
            bool(its_tokens) or isinstance(op, Score)
        )
        results.append(
            (its_tokens, _result(op, its_tokens, its_path, scores) if is_finite else None)
        )
    return results


def _result(
    op: SampleOp | Expand | Score, tokens: list[int], path: list[int], scores: list[TokenLogprobs]
) -> LogitOpResult:
    if isinstance(op, Score):
        return scores[0]
    return (
        SampleResult(tokens, path, scores) if isinstance(op, SampleOp) else Expanded(tokens, None)
    )
