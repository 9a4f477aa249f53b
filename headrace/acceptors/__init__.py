"""Acceptors decide which sequences continue after a step, and with which new tokens."""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Commit, DraftTree, TokenLogprobs
from headrace.constraint import Constraint, Masks
from headrace.logit_ops import LogitOp, LogitOpResult, SamplerState
from headrace.outputs import FinishReason


class OutputView(Protocol):
    """The part of an output that an acceptor uses."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    cumulative_logprob: float | None

    @property
    def constraint(self) -> Constraint | None:
        """The grammar or rules for the next tokens."""

    @property
    def num_left(self) -> int:
        """Tokens until the max length."""

    def clone(self) -> Self: ...

    def push(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token; sets `finish_reason` if the token ends the output."""


class SampledSequence(Protocol):
    """The part of a scheduled sequence that an acceptor uses."""

    @property
    def source(self) -> int:
        """Index in the step."""

    @property
    def first_sample_row(self) -> int:
        """Logit row of the last scheduled token, before the rows of the draft nodes."""

    @property
    def position(self) -> int:
        """Position of the next token."""

    @property
    def sampler(self) -> SamplerState: ...

    @property
    def draft(self) -> DraftTree: ...

    @property
    def num_logprobs(self) -> int:
        """Top log-probabilities with the token's own; -1: none."""

    @property
    def masks(self) -> Masks | None:
        """Allowed tokens of each row, [1 + nodes, words]; None: all."""

    @property
    def output(self) -> OutputView: ...


AnyOutput = TypeVar("AnyOutput", bound=OutputView)
AnySequence = TypeVar("AnySequence", bound=SampledSequence)


class Acceptor(Protocol):
    """Accepts tokens for independent sequences, or for one beam search."""

    is_group: bool
    """Whether the sequences are beams, which sample in the same step, one token each."""
    needs_logits: bool
    """Whether `accept` reads the logits."""

    def logit_ops(self, seqs: list[AnySequence]) -> list[LogitOp]:
        """Return the op on the logits of each sequence, in order; a group has one op for all."""

    def accept(
        self,
        seqs: list[AnySequence],
        results: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[tuple[AnySequence, Commit | None]]:
        """Return the sequences that continue, in their new order, with their commits.

        `results` has one result per op.
        `logits` is [rows, vocab] if `needs_logits`. Returning a sequence several times forks it;
        one that is not returned is freed. A commit of None fails the sequence: its logits were not
        finite.
        """

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        """Return the final outputs by index, given the outputs of its sequences."""
