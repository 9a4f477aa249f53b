"""The engine's own view of a request: the sequences that it owns, and where its time went."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat

from headrace.acceptors import Acceptor
from headrace.batch import Commit
from headrace.constraint import Constraint
from headrace.engine.adapters import LoadedAdapter
from headrace.engine.output import Output
from headrace.engine.pooling import PromptPooling
from headrace.kv.manager import Tables
from headrace.kv.prefix import Node, Scope
from headrace.logit_ops import SamplerState
from headrace.outputs import DraftStats, Logprobs, RequestOutput, Timing, Update
from headrace.request import DEFAULT_OPTIONS, RequestOptions
from headrace.sampling_params import SamplingParams


class Stopwatch:
    """Splits the time of a request into queue, prefill and decode, by a clock in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.added = clock()
        self.started: float | None = None
        self.first_token: float | None = None

    def start(self) -> bool:
        """The request, or a sequence of it, is admitted; whether that is the first time."""
        if self.started is not None:
            return False
        self.started = self._clock()
        return True

    def token(self) -> None:
        """A token was drawn."""
        if self.first_token is None:
            self.first_token = self._clock()

    def timing(self) -> Timing:
        """The split up to now."""
        now = self._clock()
        started = now if self.started is None else self.started
        first_token = now if self.first_token is None else self.first_token
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
    """Tokens, prompt and output, at which a sequence ends."""
    acceptor: Acceptor
    """How its sequences go on."""
    stopwatch: Stopwatch
    options: RequestOptions = DEFAULT_OPTIONS
    adapter: LoadedAdapter | None = None
    pooling: PromptPooling | None = None
    """Where the prompt is embedded: its sequence draws nothing, and ends when its rows are pooled.
    """
    constraint: Constraint | None = None
    """What its outputs may begin with; None: anything."""
    only_result: bool = False
    """Whether nothing is said of it before its result."""
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    """One for each prompt token so far, where they are asked for."""
    seqs: list["Sequence"] = field(default_factory=list)
    """In index order, those that have ended included, where each goes on by itself; else those
    alive, best first.

    Empty once the request has ended.
    """
    arrival: int = 0
    """The step at which it came, moved by its priority: see `Scheduler`."""
    cached_tokens: int = 0
    """Of the prompt, with KV from the prefix cache when it was admitted."""
    error: Exception | None = None
    drafts: dict[str, DraftStats] = field(default_factory=dict)
    """What came of speculation for it, by method."""

    @property
    def scope(self) -> Scope:
        """The scope within which its KV may be shared."""
        return Scope(self.options.cache_salt, self.adapter.scope if self.adapter else None)

    @property
    def ended(self) -> bool:
        return all(seq.output.finish_reason for seq in self.seqs)

    @property
    def num_tokens(self) -> int:
        """Tokens of its longest output."""
        return max((len(seq.output.token_ids) for seq in self.seqs), default=0)

    @property
    def outputs(self) -> list[Output]:
        """What it answers, by index."""
        return self.acceptor.outputs([seq.output for seq in self.seqs])

    @property
    def reads_prompt_rows(self) -> bool:
        """Whether rows of its prompt are scored or pooled."""
        return self.pooling is not None or self.params.prompt_logprobs is not None

    @property
    def scorer(self) -> "Sequence | None":
        """The sequence whose rows give the prompt log-probabilities, where several have the prompt
        to compute.
        """
        return next((seq for seq in self.seqs if seq.output.finish_reason is None), None)

    @property
    def width(self) -> int:
        """Sequences that it has once its prompt has ended."""
        return self.params.beam_width or self.params.n

    def new_updates(self) -> list[Update]:
        """What there is that was not said before; with the last update of the request comes its
        result.
        """
        if self.only_result and not self.ended:
            return []
        fresh = [(index, output) for index, output in enumerate(self.outputs) if output.has_news]
        updates = [
            Update(self.id, index, *output.take(), output.finish_reason, output.stop_reason, None)
            for index, output in fresh
        ]
        if updates and self.ended:
            updates[-1] = replace(updates[-1], result=self.result())
        return updates[-1:] if self.only_result else updates

    def result(self) -> RequestOutput:
        """All there is to say of the request now."""
        outputs = [output.completion(index) for index, output in enumerate(self.outputs)]
        prompt_logprobs = None if self.params.prompt_logprobs is None else self.prompt_logprobs
        prompt = (self.prompt, self.prompt_token_ids, prompt_logprobs)
        timing, drafts, vector = (
            self.stopwatch.timing(),
            dict(self.drafts),
            self.pooling.vector if self.pooling else None,
        )
        return RequestOutput(
            self.id,
            *prompt,
            outputs,
            self.ended,
            timing,
            self.error,
            self.cached_tokens,
            drafts,
            vector,
        )


@dataclass(eq=False)
class Sequence:
    """A row of tokens that grows. All but the last of the known tokens have, or had, KV."""

    seq_id: tuple[int, int]
    """Number of the request, index in it; that of a beam is its place of the moment."""
    request: Request
    known: list[int]
    sampler: SamplerState
    output: Output
    fork_at: int
    """Tokens that it has in common with its siblings: those of the prompt or, when beams are
    computed again, more.
    """
    siblings: list["Sequence"] = field(default_factory=list)
    """Sequences to be forked off when so many tokens are computed."""
    computed: int = 0
    """Known and pending tokens that have KV, or will have it once the launched steps have run."""
    settled: int = 0
    """Those of them whose KV finished steps have written."""
    tables: Tables = ()
    """Its blocks in each group of layers; none of them while it waits."""
    node: Node | None = None
    """Of the last full block that the prefix cache knows of."""
    num_admitted: int = 0
    """Known tokens when it was last admitted."""
    num_pending: int = 0
    """Tokens beyond the known ones that launched steps will draw."""
    num_in_flight: int = 0
    """Launched steps that it takes part in, and that have not been finished."""
    last_op: int = -1
    """Index of the logit op that draws the last pending token, in the launch that came last."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place in the order of all sequences, the lowest first; it never changes but among
        beams of one request.
        """
        return (self.request.arrival, *self.seq_id)

    @property
    def has_drawn(self) -> bool:
        """Whether it has a new token since it was last admitted."""
        return len(self.known) > self.num_admitted

    @property
    def scope(self) -> Scope:
        """The scope within which its KV may be shared."""
        return self.request.scope

    @property
    def constraint(self) -> Constraint | None:
        """What may follow its output; None: anything."""
        return self.output.constraint

    @property
    def has_changing_mask(self) -> bool:
        """Whether the mask of its next draw is not there before its next token is known."""
        return self.constraint is not None and self.constraint.changes

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def length(self) -> int:
        """Known and pending tokens."""
        return len(self.known) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Known and pending tokens without KV: at least 1, unless it is a prompt that is
        embedded.
        """
        return len(self.known) + self.num_pending - self.computed

    @property
    def at_limit(self) -> bool:
        """Whether its pending tokens are the last that it may have, or it draws none, so that it
        ends without another step.
        """
        return (
            self.num_pending > 0 and self.length >= self.request.limit
        ) or not self.num_uncomputed

    @property
    def num_until_sample(self) -> int:
        """Uncomputed tokens up to where it forks, or draws."""
        return (self.fork_at if self.siblings else self.length) - self.computed

    @property
    def width(self) -> int:
        """Sequences that come of it, itself included, at its next fork."""
        begins_search = self.request.acceptor.is_group and len(self.known) == self.fork_at
        return self.request.width if begins_search else 1 + len(self.siblings)

    @property
    def may_fork(self) -> bool:
        """Whether it may fork when it draws."""
        return bool(self.siblings) or self.request.acceptor.is_group

    @property
    def group(self) -> object:
        """What it has in common with just those sequences that draw when it does."""
        return self.request if self.request.acceptor.is_group else self

    def fork(self, tables: Tables) -> "Sequence":
        """Another that goes on from here, with tables of its own."""
        return replace(
            self,
            known=self.known[:],
            sampler=self.sampler.clone(0),
            output=self.output.clone(),
            tables=tables,
        )

    def prompt_rows(self, num_scheduled: int) -> range:
        """Positions of those of the next `num_scheduled` rows whose logits give a prompt
        log-probability that is still to be recorded.
        """
        if self.request.params.prompt_logprobs is None or self is not self.request.scorer:
            return range(0)
        recorded = len(self.request.prompt_logprobs)
        return range(
            max(self.computed, recorded - 1),
            min(self.computed + num_scheduled, self.prompt_len - 1),
        )

    def pooled_rows(self, num_scheduled: int) -> range:
        """Positions of those of the next `num_scheduled` rows that are still to be pooled."""
        pooling = self.request.pooling
        return pooling.rows(self.computed, num_scheduled) if pooling else range(0)

    @property
    def most_cached(self) -> int:
        """Known tokens whose KV may come from the prefix cache: not that of rows that are pooled,
        or have logits, as the last row has.
        """
        wanted = self.prompt_rows(self.num_uncomputed) or self.pooled_rows(self.num_uncomputed)
        return wanted.start if wanted else self.computed + self.num_until_sample - 1

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities beside a drawn token's own; -1: none at all."""
        asked = self.request.params.logprobs
        return -1 if asked is None else asked

    def receive(self, commit: Commit) -> bool:
        """Take over the new tokens, up to the one that ends the output; whether there was such a
        one.
        """
        self.request.stopwatch.token()
        for token, logprobs in zip(commit.tokens, commit.logprobs or repeat(None), strict=False):
            self.output.push(token, logprobs)
            if self.output.finish_reason:
                return True
        return False
