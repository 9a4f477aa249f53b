"""Ops on the logits of a step and on its pooled rows, their results, and the ticket of a launched
step: records and protocols.

A launch takes a batch and a list of logit ops, and gives a ticket; waiting for it gives one result
for each op. So a device can draw where its logits are, and start the next step
(`RaggedBatch.token_source`) before anything has come back to the host.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, DraftTree, TokenLogprobs
from headrace.config import AcceptanceMethod
from headrace.constraint import Masks


class SamplerState(Protocol):
    """What the draws of a sequence depend on: sampling parameters, the key of its noise, and the
    tokens that penalties apply to.

    Executables draw with it, in the order of their launches; it is opaque to all other parts.
    """

    def clone(self, seq_index: int) -> Self:
        """A copy of the state with the noise of sequence `seq_index` of the request."""

    def append(self, token: int) -> None:
        """Add a token that was chosen elsewhere, as if it had been drawn."""


class SampleOp(NamedTuple):
    """Verify a draft tree and draw the token after its accepted path; without a draft, draw one
    token.
    """

    # index among the logit rows of the last scheduled known token; the rows of draft nodes follow
    # it
    row: int
    position: int  # position in the sequence of the first token to draw
    sampler: SamplerState
    draft: DraftTree = NO_DRAFT
    num_logprobs: int = (
        -1
    )  # number of top log-probabilities wanted with each token's own; -1: not even its own
    method: AcceptanceMethod = "exact"
    masks: Masks | None = (
        None  # [1 + nodes, words] the tokens that may be drawn from each of its rows; None: all may
    )


class ShiftedSampleOps(Sequence[SampleOp]):
    """The sample ops of an earlier launch, `shift` positions later.

    An executable that has already prepared `ops` need not look at each of them again.
    """

    def __init__(self, ops: Sequence[SampleOp], shift: int) -> None:
        self.ops = ops
        self.shift = shift

    @cached_property
    def _shifted(self) -> list[SampleOp]:
        # `_replace` takes three times as long
        return [
            SampleOp(
                row=op.row,
                position=op.position + self.shift,
                sampler=op.sampler,
                draft=op.draft,
                num_logprobs=op.num_logprobs,
                method=op.method,
                masks=op.masks,
            )
            for op in self.ops
        ]

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: Any) -> Any:
        return self._shifted[index]

    def __iter__(self) -> Iterator[SampleOp]:
        return iter(self._shifted)


class SampleResult(NamedTuple):
    """The result of a `SampleOp`."""

    tokens: list[int]  # the tokens of the path, then the one drawn at its end
    path: list[int]  # accepted draft nodes, from the root down
    logprobs: list[TokenLogprobs]  # one for each token where they are asked for, else empty


class TopTokens(NamedTuple):
    """Find the `num_tokens` likeliest tokens under biases, penalties and bans, at temperature 1."""

    row: int
    position: int
    sampler: SamplerState
    num_tokens: int
    masks: Masks | None = None  # [1, words] the tokens that there are to rank; None: all


class Ranked(NamedTuple):
    """The result of `TopTokens`, best first."""

    tokens: list[int]
    logprobs: list[float]


class Score(NamedTuple):
    """Give the log-probabilities of a token under the raw distribution of a row; the result is a
    `TokenLogprobs`.
    """

    row: int
    token: int
    num_logprobs: int


class Expand(NamedTuple):
    """Draw draft tokens: the one that `SampleOp` would draw from the row, and then the next best under
    the same noise.
    """

    row: int
    position: int
    sampler: SamplerState
    seq_index: int  # index in the request of the sequence whose noise is used
    width: int  # most tokens to draw
    probabilities: bool  # whether to give the distribution that the first token is drawn from
    masks: Masks | None = None  # [1, words] the tokens that may be drawn; None: all


class Expanded(NamedTuple):
    """The result of an `Expand`."""

    tokens: list[int]  # the token of the draw first, then the next best
    probabilities: NDArray[np.float64] | None  # [vocab]


class PoolState(Protocol):
    """The rows of a prompt that have been pooled so far; executables add to it, in the order of
    their launches.
    """

    def add(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add rows [rows, dim], one after the other; returns the sum of all up to now [dim]."""


class Pool(NamedTuple):
    """Add rows behind the last norm to those of the same prompt, in their order."""

    row: int  # index among the pooled rows of the first
    num_rows: int
    state: PoolState


class Pooled(NamedTuple):
    """The result of a `Pool`."""

    total: NDArray[np.float64]  # [dim] sum of all rows of the prompt that have been pooled


LogitOp = SampleOp | TopTokens | Score | Expand | Pool
LogitOpResult = SampleResult | Ranked | TokenLogprobs | Expanded | Pooled | None
"""The result of an op; None where its logits, or its rows, were not finite."""


class StepResult(NamedTuple):
    """The results of a launch. Logits and hidden rows are there if they were asked for, and valid
    until the next launch.
    """

    values: list[LogitOpResult]  # one for each logit op, in their order
    logits: NDArray[np.float32] | None = None  # [R, vocab]
    hidden: NDArray[np.float32] | None = (
        None  # [R, dim] the rows that the logits are computed from, if the program keeps them
    )


class Ticket(Protocol):
    """Stands for the results of a step that has been launched."""

    @property
    def ready(self) -> bool:
        """Whether the results are there, so that `wait` returns at once."""

    def wait(self) -> StepResult:
        """Wait for the results and return them."""


class Done:
    """The ticket of a step that ran when it was launched."""

    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The results."""
        return self._result
