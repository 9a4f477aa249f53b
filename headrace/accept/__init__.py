"""What an acceptor is: which rows of a step survive, and which tokens follow them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Commit, DraftTree, TokenLogprobs
from headrace.logit_ops import LogitOp, LogitOpResult, SamplerState
from headrace.request import FinishReason


class OutputView(Protocol):
    """What an acceptor sees of a sequence's output."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    cumulative_logprob: float | None

    def clone(self) -> Self: ...
    def push(self, token: int, logprobs: TokenLogprobs | None) -> None: ...  # sets the reason if the token ends the output


AnyOutput = TypeVar("AnyOutput", bound=OutputView)


@dataclass(slots=True, eq=False)
class Drawing:
    """A sequence whose next token is due in a step."""

    source: int
    """Index of the sequence in the step."""
    row: int
    """Index of its first logits to draw from; those of its draft nodes follow."""
    position: int
    """Of the next token."""
    known: list[int]
    sampler: SamplerState
    draft: DraftTree
    num_logprobs: int
    """Log-probabilities beside a drawn token's own; -1: none at all."""
    output: OutputView


class Accepted(NamedTuple):
    """What became of a drawing sequence."""

    drawing: int  # index of it
    commit: Commit | None  # None: its logits were not finite, and its request fails


class Acceptor(Protocol):
    """How sequences go on. One object serves all requests whose sequences are independent; a beam search belongs to its request."""

    is_group: bool
    """Whether the sequences of a request draw all in one step, one token each, and live on by what they drew together."""
    needs_logits: bool
    """Whether `accept` reads the logits themselves."""

    def logit_ops(self, drawings: list[Drawing]) -> list[LogitOp]:
        """What is to be done with the logits of the step: one op for each drawing."""

    def accept(self, drawings: list[Drawing], values: Sequence[LogitOpResult], logits: NDArray[np.float32] | None) -> list[Accepted]:
        """What follows, by the results of these ops and by `logits` [rows, vocab]: for each commit the drawing that it continues.

        The order is that of the sequences to be. A drawing that several commits continue is forked; one that none continues is freed.
        """

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        """What the request answers, by index, if its sequences have written `outputs`: only what will not be taken back."""
