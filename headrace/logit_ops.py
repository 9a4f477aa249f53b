"""What may be done with the logits of a step, where they are, and the ticket that stands for the results: records and protocols.

A launch takes a batch and a list of logit ops; waiting for its ticket gives one result for each op. So a device can draw where its
logits lie, and feed the next step (`RaggedBatch.token_source`) before anything has come back to the host.
"""

from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, DraftTree, TokenLogprobs
from headrace.config import AcceptanceMethod


class SamplerState(Protocol):
    """How the tokens of a sequence are drawn: sampling parameters, the key of its noise, and the tokens that penalties look at.

    Executables draw with it, in the order of their launches; for everybody else it is opaque.
    """

    def clone(self, seq_index: int) -> Self:
        """The same state under the noise of another sequence of the request."""

    def append(self, token: int) -> None:
        """A token that was chosen elsewhere becomes part of the state, as if it had been drawn."""


class Draw(NamedTuple):
    """Verify a draft tree and draw the token that follows what survives of it; without a draft, draw one token."""

    row: int  # among the logit rows: of the last scheduled known token; the rows of draft nodes follow it
    position: int  # of the first token to draw
    sampler: SamplerState
    draft: DraftTree = NO_DRAFT
    num_logprobs: int = -1  # log-probabilities beside each token's own; -1: none at all
    method: AcceptanceMethod = "exact"


class Drawn(NamedTuple):
    """The result of a `Draw`."""

    tokens: list[int]  # those of the path, then the one drawn at its end
    path: list[int]  # accepted draft nodes, from the root down
    logprobs: list[TokenLogprobs]  # one for each token where they are asked for, else empty


class TopTokens(NamedTuple):
    """Find the `num_tokens` likeliest tokens under biases, penalties and bans, at temperature 1."""

    row: int
    position: int
    sampler: SamplerState
    num_tokens: int


class Ranked(NamedTuple):
    """The result of `TopTokens`, best first."""

    tokens: list[int]
    logprobs: list[float]


class Score(NamedTuple):
    """Give the log-probabilities of a token under the raw distribution of a row; the result is a `TokenLogprobs`."""

    row: int
    token: int
    num_logprobs: int


class Expand(NamedTuple):
    """Draw the next token of a drafted chain, and beside it the next best under the same noise; what `Draw` does by the same row."""

    row: int
    position: int
    sampler: SamplerState
    seq_index: int  # the sequence of the request whose noise is used
    width: int  # most tokens
    probabilities: bool  # whether the distribution that the first is drawn from is wanted


class Expanded(NamedTuple):
    """The result of an `Expand`."""

    tokens: list[int]  # the draw first
    probabilities: NDArray[np.float64] | None  # [vocab]


LogitOp = Draw | TopTokens | Score | Expand
LogitOpResult = Drawn | Ranked | TokenLogprobs | Expanded | None
"""None: the op met logits that are not finite."""


class StepResult(NamedTuple):
    """What a launched step gives back. Logits and hidden rows are there where they were asked for, until the next launch."""

    values: list[LogitOpResult]  # one for each logit op
    logits: NDArray[np.float32] | None = None  # [R, vocab]
    hidden: NDArray[np.float32] | None = None  # [R, dim] what the logits are computed from, if the program keeps it


class Ticket(Protocol):
    """A step that has been launched."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> StepResult:
        """The results, as soon as they are there."""


class Done:
    """The ticket of a step that ran when it was launched."""

    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The results."""
        return self._result
