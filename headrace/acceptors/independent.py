"""The acceptor of every request without beam search."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.acceptors import AnyOutput, AnySequence
from headrace.batch import Commit
from headrace.config import AcceptanceMethod
from headrace.logit_ops import LogitOp, LogitOpResult, SampleOp, SampleResult


class IndependentAcceptor:
    """Accepts the sampled tokens of each sequence, with one method for all drafts."""

    is_group = False
    needs_logits = False

    def __init__(self, method: AcceptanceMethod) -> None:
        self._method = method

    def logit_ops(self, seqs: list[AnySequence]) -> list[LogitOp]:
        method = self._method
        return [
            SampleOp(
                seq.first_sample_row,
                seq.position,
                sampler=seq.sampler,
                draft=seq.draft,
                num_logprobs=seq.num_logprobs,
                method=method,
                masks=seq.masks,
            )
            for seq in seqs
        ]

    def accept(
        self,
        seqs: list[AnySequence],
        results: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[tuple[AnySequence, Commit | None]]:
        return [
            (seq, _commit(seq.source, result)) for seq, result in zip(seqs, results, strict=True)
        ]

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        return outputs


def _commit(source: int, result: LogitOpResult) -> Commit | None:
    if not isinstance(result, SampleResult):
        return None
    return Commit(source, result.path, tokens=result.tokens, logprobs=result.logprobs)
