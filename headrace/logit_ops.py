"""Logit ops of a step, their results, and the ticket of a launched step.

A launch takes a batch and a list of logit ops, and returns a ticket. Waiting for the
ticket returns one result per op. So a GPU can sample next to its logits, and start the
next step (`RaggedBatch.token_source`) before a result reaches the host.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, DraftTree, TokenLogprobs
from headrace.config import AcceptanceMethod
from headrace.constraint import Masks, Trie

ALL_LOGPROBS = (1 << 31) - 1
"""A `num_logprobs` that returns all tokens of the vocabulary; only the host does it."""


class SamplerState(Protocol):
    """State of a sequence's sampler: parameters, random key, and tokens that penalties apply to.

    Executables sample with it, in the order of their launches; other parts cannot look
    inside.
    """

    def clone(self, seq_index: int) -> Self:
        """Return a copy with the random numbers of sequence `seq_index` of the request."""

    def append(self, token: int) -> None:
        """Add a token as if this sampler had sampled it."""


class SampleOp(NamedTuple):
    """Verify a draft tree, and sample the token after its accepted path.

    Without a draft, the op samples one token.
    """

    row: int
    """Index among the logit rows of the last scheduled known token; draft nodes follow it."""
    position: int  # of the first sampled token, in the sequence
    sampler: SamplerState
    draft: DraftTree = NO_DRAFT
    num_logprobs: int = -1
    """Number of top log-probabilities to return next to each token's own; -1: return neither."""
    method: AcceptanceMethod = "exact"
    masks: Masks | None = None
    """[1 + nodes, words] tokens allowed at each row; None: all tokens."""


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


class LaterExpands(Sequence["Expand"]):
    """The first `count` expand ops of an earlier launch, `shift` positions later: the next depth of
    chains of drafts.

    An executable that has already prepared `ops` need not look at each of them again.
    """

    def __init__(self, ops: Sequence["Expand"], shift: int, count: int) -> None:
        self.ops = ops
        self.shift = shift
        self._count = count

    @cached_property
    def _later(self) -> list["Expand"]:
        return [op._replace(position=op.position + self.shift) for op in self.ops[: self._count]]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._later[index]

    def __iter__(self) -> Iterator["Expand"]:
        return iter(self._later)


class SampleResult(NamedTuple):
    """Result of a `SampleOp`."""

    tokens: list[int]  # accepted tokens, then the token sampled after them
    path: list[int]  # accepted draft nodes, from the root down
    logprobs: list[TokenLogprobs]  # one per token if `num_logprobs` >= 0, else empty


class RankBeams(NamedTuple):
    """Rank the tokens that may continue the beams of a search.

    A total is the sum of the log-probabilities of a beam's tokens, at temperature 1, among all
    tokens, under biases, penalties and bans. Masks and the trie only choose the tokens to rank.
    """

    rows: list[int]
    """[beams] logit row of each beam."""
    position: int
    """Position of the next token, in each beam."""
    samplers: list[SamplerState]
    totals: list[float]
    num_candidates: int
    """Candidates to find that do not end their beam."""
    all_count: bool
    """Whether candidates that end their beam count, too."""
    end_ids: list[int]
    """Tokens that end a beam."""
    masks: Masks | None = None
    """[beams, words] tokens to rank; None: all, or those of the trie."""
    trie: Trie | None = None
    """The token sequences of which each beam must become one."""
    nodes: Sequence[int] = ()
    """[beams] place of each beam in the trie; empty without a trie."""


class RankedBeams(NamedTuple):
    """Result of a `RankBeams` op: beams with one more token, to the last that counts.

    Best first; equal totals by beam, then by token.
    """

    beams: list[int]
    tokens: list[int]
    totals: list[float]
    ends: list[bool]
    """Whether an end token or a leaf of the trie ends the beam."""


class Score(NamedTuple):
    """Score a token at a row, before temperature and penalties; the result is `TokenLogprobs`."""

    row: int
    token: int
    num_logprobs: int


class TokenMap(Protocol):
    """The tokens of rows of logits that lack some of the vocabulary."""

    @property
    def tokens(self) -> list[int]:
        """The token of each logit, ascending."""


class Expand(NamedTuple):
    """Sample draft tokens: first the token of a `SampleOp`, then the next best tokens.

    All of them use the same random numbers.
    """

    row: int
    position: int
    sampler: SamplerState
    seq_index: int  # sequence of the request whose random numbers are used
    width: int  # maximum tokens
    probabilities: bool  # whether to return the distribution of the first token
    masks: Masks | None = None  # [1, words] allowed tokens; None: all
    tokens: TokenMap | None = None
    """The tokens of the row's logits; None: logit i is token i's. Other tokens are not sampled."""


class Expanded(NamedTuple):
    """Result of an `Expand` op."""

    tokens: list[int]  # sampled token, then the next best tokens
    probabilities: NDArray[np.float64] | None  # [vocab]
    scores: Sequence[float] = ()
    """Logarithm of the estimated probability of each token; empty if the backend gives none."""


class PoolState(Protocol):
    """Pooled rows of a prompt so far. Executables add rows in the order of their launches."""

    def add(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add rows [rows, dim] one by one, and return the sum of all rows so far [dim]."""


class Pool(NamedTuple):
    """Add final hidden rows to the pooled rows of their prompt, in order."""

    row: int  # index of the first row, among the pooled rows
    num_rows: int
    state: PoolState


class Pooled(NamedTuple):
    """Result of a `Pool` op."""

    total: NDArray[np.float64]  # [dim] sum of the prompt's pooled rows so far


LogitOp = SampleOp | RankBeams | Score | Expand | Pool
LogitOpResult = SampleResult | RankedBeams | TokenLogprobs | Expanded | Pooled | None
"""Result of an op; None if its logits or rows were not finite."""


class KeptRows(Protocol):
    """Rows of a step in the memory of a device."""

    def __getitem__(self, row: int, /) -> object:
        """Return a handle of the row, which the device keeps as long as the handle lives."""


class StepResult(NamedTuple):
    """Results of a launch. Arrays are valid until the next launch."""

    values: list[LogitOpResult]  # one per logit op, in order
    logits: NDArray[np.float32] | None = None  # [R, vocab], if the launch returns them
    hidden: NDArray[np.float32] | None = None
    """[R, dim] hidden rows of the logits, if the program keeps them."""
    taps: NDArray[np.float32] | None = None
    """[T, width] rows before some layers, next to each other, if the program keeps them."""
    kept_taps: KeptRows | None = None
    """[T] the taps in the memory of a device, in place of `taps`, for a drafter on the device."""


class Ticket(Protocol):
    """Handle of the results of a launched step."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> StepResult:
        """Wait for the results and return them."""


class Done:
    """Ticket of a step that ran during its launch."""

    ready = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
