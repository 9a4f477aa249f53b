"""The engine's own view of a request: the branches that it owns, and where its time went."""

from array import array
from dataclasses import dataclass, field
from itertools import repeat
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from headrace.accept.sampler import Sampler
from headrace.batch import Commit
from headrace.engine.output import Output, TokenizerView, prompt_logprobs
from headrace.kv.blocks import Table
from headrace.request import GuessStats, Logprobs, RequestOutput, SamplingParams, Timing, Update


class Stopwatch:
    """Splits the time of a request into queue, prefill and decode."""

    def __init__(self) -> None:
        self.added = perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None

    def start(self) -> None:
        """The first rows of the request are in a step."""
        self.started = self.started or perf_counter()

    def token(self) -> None:
        """A token was drawn."""
        self.first_token = self.first_token or perf_counter()

    def timing(self) -> Timing:
        """The split up to now."""
        now = perf_counter()
        started = self.started or now
        first_token = self.first_token or now
        return Timing(started - self.added, first_token - started, now - first_token)


@dataclass(eq=False)
class Request:
    """A request in the engine."""

    number: int
    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    """Tokens, prompt and output, at which a branch ends."""
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    """One for each prompt token so far, where they are asked for."""
    branches: list["Branch"] = field(default_factory=list)
    """In index order, those that have ended included; empty once the request has ended."""
    error: Exception | None = None
    guesses: dict[str, GuessStats] = field(default_factory=dict)
    """What came of guessing for it, by method."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def ended(self) -> bool:
        return all(branch.output.finish_reason for branch in self.branches)

    def result(self) -> RequestOutput:
        """All there is to say of the request now."""
        outputs = [branch.output.completion(branch.key[1]) for branch in self.branches]
        prompt_logprobs = None if self.params.prompt_logprobs is None else self.prompt_logprobs
        prompt = (self.prompt, self.prompt_token_ids, prompt_logprobs)
        return RequestOutput(self.id, *prompt, outputs, self.ended, self.stopwatch.timing(), self.error, dict(self.guesses))


@dataclass(eq=False)
class Branch:
    """One line of tokens that grows. All but the last of the known tokens have, or had, KV."""

    key: tuple[int, int]
    """Number of the request, index in it: the older a branch, the smaller its key."""
    request: Request
    known: list[int]
    sampler: Sampler
    output: Output
    siblings: list["Branch"] = field(default_factory=list)
    """Branches to be forked off when the prompt ends."""
    computed: int = 0
    table: Table = field(default_factory=lambda: array("i"))
    """An array, so that `build` copies it whole."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def missing(self) -> int:
        """Known tokens without KV; at least 1."""
        return len(self.known) - self.computed

    def prompt_rows(self, forced: int) -> range:
        """Positions of the next `forced` rows whose logits give a prompt log-probability that is still to be recorded."""
        if self.request.params.prompt_logprobs is None:
            return range(0)
        recorded = len(self.request.prompt_logprobs)
        return range(max(self.computed, recorded - 1), min(self.computed + forced, self.prompt_len - 1))

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities beside a drawn token's own; -1: none at all."""
        asked = self.request.params.logprobs
        return -1 if asked is None else asked

    def score_prompt(self, forced: int, logits: NDArray[np.float32], first: int, tokenizer: TokenizerView) -> None:
        """Record the prompt log-probabilities that the next `forced` rows give: `logits` [rows, vocab] from row `first` on."""
        if rows := self.prompt_rows(forced):
            tokens = self.known[rows.start + 1 : rows.stop + 1]
            scored, num_logprobs = logits[first : first + len(rows)], self.request.params.prompt_logprobs or 0
            self.request.prompt_logprobs += prompt_logprobs(tokenizer, tokens, scored, num_logprobs)

    def receive(self, commit: Commit) -> bool:
        """Take over the new tokens, up to the one that ends the output; whether there was such a one."""
        self.request.stopwatch.token()
        for token, logprobs in zip(commit.tokens, commit.logprobs or repeat(None), strict=False):
            self.output.push(token, logprobs)
            if self.output.finish_reason:
                return True
        return False

    def update(self) -> Update:
        """What is new; with the last update of a request comes its result."""
        request = self.request
        news = self.output.take()
        result = request.result() if self.output.finish_reason and request.ended else None
        return Update(request.id, self.key[1], *news, self.output.finish_reason, result)
