"""What an acceptor is: which rows of a step survive, and which tokens follow them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.accept.sampler import Pool, Sampler
from headrace.batch import Commit, DraftTree, TokenLogprobs
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
class Draw:
    """A sequence whose next token is due."""

    source: int
    """Index of the sequence in the step."""
    row: int
    """Where the logits of its last scheduled row are; those of its draft nodes follow."""
    known: list[int]
    sampler: Sampler
    draft: DraftTree
    num_logprobs: int
    """-1: no log-probabilities."""
    line: OutputView


class Accepted(NamedTuple):
    """What became of a draw."""

    draw: int  # index of it
    commit: Commit | None  # None: its logits were not finite, and its request fails


class Acceptor(Protocol):
    """How sequences go on. One object serves all requests whose sequences go on each by itself; a search belongs to its request."""

    is_group: bool
    """Whether the sequences of a request draw all in one step, one token each, and live on by what they drew together."""

    def accept(self, draws: list[Draw], logits: NDArray[np.float32], pool: Pool) -> list[Accepted]:
        """What follows, by `logits` [rows, vocab]: for each commit the draw that it continues, in the order of the sequences to be.

        A draw that several continue is forked; one that none continues is freed.
        """

    def outputs(self, lines: list[AnyOutput]) -> list[AnyOutput]:
        """What the request answers, by index, if its sequences have written `lines`: only what will not be taken back."""
