"""Results of sampling on the device, as records."""

from typing import NamedTuple

import numpy as np

from headrace.backend.cuda.sampling_layout import SampleLayout
from headrace.batch import Ints, TokenLogprobs
from headrace.logit_ops import Expand, Expanded, LogitOpResult, SampleOp, SampleResult, Score


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
