"""Requests in the engine, and their sequences."""

from copy import copy
from dataclasses import dataclass, field

from headrace.acceptors import Acceptor
from headrace.batch import Commit
from headrace.constraint import Constraint
from headrace.engine.adapters import LoadedAdapter
from headrace.engine.output import Output
from headrace.engine.pooling import PromptPooling
from headrace.engine.request_timer import RequestTimer
from headrace.kv.manager import Tables
from headrace.kv.prefix import Node, Scope
from headrace.logit_ops import ALL_LOGPROBS, SamplerState
from headrace.outputs import DraftStats, Logprobs, RequestOutput, Update
from headrace.request import DEFAULT_OPTIONS, RequestOptions
from headrace.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    number: int
    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    """Max tokens of a sequence, prompt and output."""
    acceptor: Acceptor
    timer: RequestTimer
    options: RequestOptions = DEFAULT_OPTIONS
    adapter: LoadedAdapter | None = None
    pooling: PromptPooling | None = None
    """Set if the prompt is embedded. Its sequence does not sample."""
    score_from: int | None = None
    """Set if the prompt is only scored from this token on. Its sequence does not sample, and the
    last token gets no KV.
    """
    constraint: Constraint | None = None
    """Grammar or rules for the first token of each output."""
    only_result: bool = False
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    """One entry for each prompt token so far, if requested."""
    seqs: list["Sequence"] = field(default_factory=list)
    """Independent sequences by index, or the live beams, best first; empty after the end."""
    arrival: int = 0
    """Step of arrival, moved by the priority."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache at the first admission."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """By index of the sequence that failed."""
    drafts: dict[str, DraftStats] = field(default_factory=dict)
    reads_prompt_rows: bool = field(init=False)
    """Whether rows of the prompt are scored or pooled."""

    def __post_init__(self) -> None:
        self.reads_prompt_rows = self.pooling is not None or self.params.prompt_logprobs is not None
        if self.score_from is not None:
            self.prompt_logprobs = [None] * self.score_from

    @property
    def scope(self) -> Scope:
        return Scope(self.options.cache_salt, self.adapter.scope if self.adapter else None)

    @property
    def samples(self) -> bool:
        """Whether its sequences sample; else the request ends with its prompt."""
        return self.pooling is None and self.score_from is None

    @property
    def ended(self) -> bool:
        return None not in [seq.output.finish_reason for seq in self.seqs]

    @property
    def error(self) -> Exception | None:
        """The error of the first failed sequence by index, so that no batch changes it."""
        return self.errors[min(self.errors)] if self.errors else None

    @property
    def num_tokens(self) -> int:
        return max((len(seq.output.token_ids) for seq in self.seqs), default=0)

    @property
    def outputs(self) -> list[Output]:
        outputs = [seq.output for seq in self.seqs]
        return self.acceptor.outputs(outputs) if self.acceptor.is_group else outputs

    @property
    def scorer(self) -> "Sequence | None":
        return next((seq for seq in self.seqs if seq.output.finish_reason is None), None)

    @property
    def width(self) -> int:
        return self.params.beam_width or self.params.n

    def new_updates(self) -> list[Update]:
        if self.only_result and not self.ended:
            return []
        updates: list[Update] = []
        for index, output in enumerate(self.outputs):
            if output.has_new:
                text, token_ids, logprobs = output.take()
                update = Update(self.id, index, text=text, token_ids=token_ids, logprobs=logprobs)
                update.finish_reason, update.stop_reason = output.finish_reason, output.stop_reason
                updates.append(update)
        if updates and updates[-1].finish_reason and self.ended:
            updates[-1].result = self.result()
        return updates[-1:] if self.only_result else updates

    def result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=(None if self.params.prompt_logprobs is None else self.prompt_logprobs),
            outputs=[output.completion(index) for index, output in enumerate(self.outputs)],
            finished=self.ended,
            timing=self.timer.timing(),
            error=self.error,
            cached_tokens=self.cached_tokens,
            drafts=dict(self.drafts),
            embedding=self.pooling.vector if self.pooling else None,
        )


@dataclass(eq=False)
class Sequence:
    """A growing list of tokens. The last known token has no KV before the next step."""

    seq_id: tuple[int, int]
    """Request and index in it. The index of a beam is its rank."""
    request: Request
    known: list[int]
    sampler: SamplerState
    output: Output
    fork_at: int
    """Number of tokens shared with the siblings, which fork off then."""
    keep: str = ""
    """Name under which its KV is kept at its end; empty: it is freed."""
    siblings: list["Sequence"] = field(default_factory=list)
    computed: int = 0
    """Tokens that have KV once all launched steps have run."""
    settled: int = 0
    """Tokens whose KV finished steps have written."""
    tables: Tables = ()
    """Block table of each KV group; empty while the sequence waits."""
    node: Node | None = None
    """Node of the last full block in the prefix cache."""
    num_admitted: int = 0
    """Known tokens at the last admission."""
    since: int = 0
    """Number of the move that put it into the waiting or the running queue."""
    num_held_up: int = 0
    """Steps in which only sequences that passed it kept it waiting."""
    num_pending: int = 0
    """Tokens that launched steps will sample."""
    num_in_flight: int = 0
    last_op: int = -1
    """Index of the last launch's op that samples the last pending token."""
    num_unread: int = field(init=False)
    """Number of last tokens that no step computes: 1 for a scored prompt."""
    is_beam: bool = field(init=False)
    """Whether it samples in the same steps as the other beams of its request."""
    num_logprobs: int = field(init=False)
    """Number of top log-probabilities; -1: not even the token's own."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.num_unread = 0 if self.request.score_from is None else 1
        self.is_beam = params.beam_width is not None
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            self.num_logprobs = ALL_LOGPROBS  # of which the output keeps the named tokens

    @property
    def rank(self) -> tuple[int, int, int]:
        """Place among all sequences. Only the ranks of beams within one request change."""
        return (self.request.arrival, *self.seq_id)

    @property
    def has_sampled(self) -> bool:
        return len(self.known) > self.num_admitted

    @property
    def scope(self) -> Scope:
        return self.request.scope

    @property
    def constraint(self) -> Constraint | None:
        return self.output.constraint

    @property
    def is_greedy(self) -> bool:
        return self.request.params.temperature == 0

    @property
    def has_changing_mask(self) -> bool:
        """Whether the mask of the token after the next depends on the next token."""
        constraint = self.output.constraint
        return constraint is not None and constraint.changes

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def length(self) -> int:
        return len(self.known) + self.num_pending - self.num_unread

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens without KV; 0 only for embedded and scored prompts."""
        return len(self.known) + self.num_pending - self.num_unread - self.computed

    @property
    def num_until_sample(self) -> int:
        """Uncomputed tokens until the sequence forks or samples."""
        return (self.fork_at if self.siblings else self.length) - self.computed

    @property
    def width(self) -> int:
        """Number of sequences after the next fork."""
        starts_search = self.is_beam and len(self.known) == self.fork_at
        return self.request.width if starts_search else 1 + len(self.siblings)

    @property
    def may_fork(self) -> bool:
        return self.is_beam or bool(self.siblings)

    @property
    def group(self) -> object:
        """An object that sequences share if they must sample in the same step."""
        return self.request if self.is_beam else self

    def fork(self, tables: Tables) -> "Sequence":
        fork = copy(self)
        fork.known = self.known[:]
        fork.sampler = self.sampler.clone(0)
        fork.output = self.output.clone()
        fork.tables = tables
        return fork

    def prompt_rows(self, num_scheduled: int) -> range:
        if self.request.params.prompt_logprobs is None or self is not self.request.scorer:
            return range(0)
        num_recorded = len(self.request.prompt_logprobs)
        first = max(self.computed, num_recorded - 1)
        return range(first, min(self.computed + num_scheduled, self.prompt_len - 1))

    def pooled_rows(self, num_scheduled: int) -> range:
        pooling = self.request.pooling
        return pooling.rows(self.computed, num_scheduled) if pooling else range(0)

    @property
    def max_cached(self) -> int:
        """Max tokens from the prefix cache: pooled, scored and sampled rows must be computed."""
        read = self.prompt_rows(self.num_uncomputed) or self.pooled_rows(self.num_uncomputed)
        return read.start if read else self.computed + self.num_until_sample - 1

    @property
    def has_read_prompt(self) -> bool:
        """Whether a sequence that does not sample has read all rows that it needs."""
        pooling = self.request.pooling
        if pooling is not None:
            return pooling.vector is not None
        return self.request.score_from is not None and self.settled >= self.prompt_len - 1

    def receive(self, commit: Commit) -> bool:
        """Append new tokens until the output ends; returns whether it ended."""
        self.request.timer.token()
        output = self.output
        for i, token in enumerate(commit.tokens):
            output.push(token, commit.logprobs[i] if commit.logprobs else None)
            if output.finish_reason:
                return True
        return False
