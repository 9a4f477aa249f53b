"""The acceptor of independent sequences: those of every request without beam search."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.acceptors import Accepted, AnyOutput, Drawing
from headrace.batch import Commit
from headrace.config import AcceptanceMethod
from headrace.logit_ops import LogitOp, LogitOpResult, SampleOp, SampleResult


class IndependentAcceptor:
    """Commits what each sequence draws, by one acceptance method."""

    is_group = False
    needs_logits = False

    def __init__(self, method: AcceptanceMethod) -> None:
        self._method = method

    def logit_ops(self, drawings: list[Drawing]) -> list[LogitOp]:
        """A `SampleOp` for each drawing."""
        return [
            SampleOp(d.row, d.position, d.sampler, d.draft, d.num_logprobs, self._method, d.masks)
            for d in drawings
        ]

    def accept(
        self,
        drawings: list[Drawing],
        values: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[Accepted]:
        """Each drawing with its commit, in their order."""
        return [
            Accepted(
                i,
                Commit(drawing.source, drawn.path, drawn.tokens, drawn.logprobs)
                if isinstance(drawn, SampleResult)
                else None,
            )
            for i, (drawing, drawn) in enumerate(zip(drawings, values, strict=True))
        ]

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        """All outputs, as they are."""
        return outputs
