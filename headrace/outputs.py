"""Results of requests, and the updates that a stream yields. Names are as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the command line imports these records before it needs NumPy
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class Logprob(NamedTuple):
    """Log-probability of a token, before temperature and penalties, and its rank."""

    logprob: float
    rank: int  # 1 is the likeliest token
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Log-probabilities by token id: the token itself, then the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a request by the work that it waited for. They sum to its total time."""

    queue: float
    """Until its first step."""
    prefill: float
    """Steps until its first token."""
    decode: float
    """Steps from its first token to its end."""
    detokenise: float
    """After the results of its steps: tokens and text of all requests in the step."""

    @property
    def output(self) -> float:
        """Seconds that an output takes: all but queue and prefill."""
        return self.decode + self.detokenise


class DraftStats(NamedTuple):
    """Counters of one proposer of draft tokens."""

    steps: int = 0
    """Steps of a sequence with a draft of this proposer."""
    proposed: int = 0
    """Draft tokens in these steps."""
    accepted: int = 0
    """Accepted draft tokens. Each step also gives one token that no proposer drafted."""
    seconds_saved: float = 0.0
    """Estimated seconds of the plain steps that drafts replaced, minus the time of
    drafting and of draft rows. Negative if speculation lost time.
    """
    seconds: float = 0.0
    """Seconds of the proposer's calls for these drafts."""

    def plus(self, other: "DraftStats") -> "DraftStats":
        return DraftStats(
            steps=self.steps + other.steps,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            seconds_saved=self.seconds_saved + other.seconds_saved,
            seconds=self.seconds + other.seconds,
        )

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per step with a draft, the undrafted token included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Number of the continuation; in a beam search its rank, with 0 for the best beam."""
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    cumulative_logprob: float | None
    """Sum of the tokens' log-probabilities, if `logprobs` is set. A beam always has the
    sum of the log-probabilities that ranked it.
    """
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """Stop token id or stop string that ended the text; None for other reasons, such as
    the model's own end token.
    """


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Complete result of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    """One entry per prompt token. The first is None, because no token precedes it."""
    outputs: list[CompletionOutput]
    finished: bool
    timing: Timing
    error: Exception | None = None
    """Error of a failed request, whose `finish_reason` is `error`."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    drafts: Mapping[str, DraftStats] = field(default_factory=dict)
    """Counters of speculative decoding, by proposer."""
    embedding: "NDArray[np.float32] | None" = None  # [dim]
    """Embedding of the prompt. None for a continuation, and after a timeout."""


@dataclass(slots=True)
class Update:
    """New tokens of one continuation of a request.

    The engine makes one for each token, so it is not frozen: that would take a microsecond more.

    A beam search reports all its updates at its end, with the complete text of each
    beam.
    """

    request_id: str
    index: int
    text: str
    """New text, which is final: the engine holds text back while it may become a stop string."""
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended the continuation."""
    result: RequestOutput | None = None
    """Complete result, in the last update of the request."""
