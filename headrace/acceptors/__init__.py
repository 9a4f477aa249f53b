"""The protocol of acceptors, which decide what each sequence keeps of a step, and its records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Commit, DraftTree, TokenLogprobs
from headrace.constraint import Constraint, Masks
from headrace.logit_ops import LogitOp, LogitOpResult, SamplerState
from headrace.request import FinishReason


class OutputView(Protocol):
    """The part of a sequence's output that an acceptor uses."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    cumulative_logprob: float | None

    @property
    def constraint(self) -> Constraint | None: ...  # what may follow
    def clone(self) -> Self: ...
    def push(
        self, token: int, logprobs: TokenLogprobs | None
    ) -> None: ...  # sets `finish_reason` if the token ends the output


AnyOutput = TypeVar("AnyOutput", bound=OutputView)


@dataclass(slots=True, eq=False)
class Drawing:
    """A sequence whose next token is drawn in a step."""

    source: int
    """Index of the sequence in the step."""
    row: int
    """Index among the logit rows of its last scheduled row; the rows of its draft nodes follow it.
    """
    position: int
    """Position of the next token in the sequence."""
    known: list[int]
    """All decided tokens, prompt and output."""
    sampler: SamplerState
    draft: DraftTree
    num_logprobs: int
    """Number of top log-probabilities wanted with a token's own; -1: not even its own."""
    output: OutputView
    masks: Masks | None = None  # [1 + nodes, words]
    """The tokens that may be drawn from each of its rows; None: all may."""


class Accepted(NamedTuple):
    """A sequence that goes on after a drawing, or fails."""

    drawing: int  # index of the drawing that it continues
    commit: Commit | None  # None: its logits were not finite, and its request fails


class Acceptor(Protocol):
    """Decides which sequences go on after a step, and with which tokens.

    One acceptor serves all requests whose sequences are independent; a beam search belongs to its
    request.
    """

    is_group: bool
    """Whether all sequences of a request draw in the same step, one token each, and are accepted
    together: a beam group.
    """
    needs_logits: bool
    """Whether `accept` reads the logits."""

    def logit_ops(self, drawings: list[Drawing]) -> list[LogitOp]:
        """The ops on the logits of the step: one for each drawing, in their order."""

    def accept(
        self,
        drawings: list[Drawing],
        values: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[Accepted]:
        """The sequences that go on, in their new order, by the results of those ops and, if needed,
        `logits` [rows, vocab].

        A drawing that is continued several times is forked; one that is not continued is freed.
        """

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        """The outputs that the request shows, by index, when its sequences have written `outputs`:
        only what is final.
        """
