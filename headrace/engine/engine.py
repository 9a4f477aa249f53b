"""The engine: requests in, updates out. Everything here runs in the caller's thread, and only in one at a time."""

from dataclasses import dataclass
from itertools import count

from headrace.accept.rules import RULES
from headrace.accept.sampler import derive_seed, make_sampler
from headrace.backend import Executable
from headrace.batch import Proposer
from headrace.config import EngineConfig, KvConfig
from headrace.engine.branch import Branch, Request
from headrace.engine.output import Output, TokenizerView, end_ids
from headrace.engine.scheduler import Scheduler
from headrace.engine.step import Stepper
from headrace.engine.stops import StopPattern
from headrace.errors import ClosedError, RequestError
from headrace.kv.blocks import BlockPool
from headrace.propose import Guard
from headrace.request import RequestOutput, SamplingParams, Update, token_ids


@dataclass(frozen=True)
class Limits:
    """What the model and its executable can hold."""

    vocab_size: int
    """Width of a row of logits."""
    max_model_len: int
    """Longest sequence, prompt and output."""
    kv: KvConfig


@dataclass(frozen=True)
class Stats:
    """What the engine does now, and what it has done."""

    running: int
    """Branches with KV."""
    waiting: int
    """Branches that wait for their first step, or for their next after preemption."""
    blocks_free: int
    blocks_total: int
    steps: int
    rows: int
    guessed: int
    """Guess rows so far."""
    accepted: int
    """Those that were right."""
    proposer_failures: int
    preemptions: int


class Engine:
    """Continuous batching over one executable."""

    def __init__(self, executable: Executable, tokenizer: TokenizerView, limits: Limits, config: EngineConfig, proposer: Proposer) -> None:
        self.limits = limits
        self.config = config
        self._tokenizer = tokenizer
        self._pool = BlockPool(limits.kv.num_blocks, limits.kv.block_size)
        self._proposer = Guard(proposer, limits.vocab_size)
        self._scheduler = Scheduler(self._pool, config, proposer.max_nodes)
        self._stepper = Stepper(self._scheduler, self._proposer, executable, self._pool, tokenizer, RULES[config.acceptance])
        self._requests: dict[str, Request] = {}
        self._numbers = count()
        self._closed = False

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. Raises RequestError for one that cannot be served, and nothing is queued."""
        self._check_open()
        params = params or SamplingParams()
        known = self.check(prompt_token_ids, params)
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is under way already")
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        limit = self._limit(len(known), params)
        request = Request(number, request_id, prompt, known, params, limit)
        request.branches = self._branches(request)
        self._requests[request_id] = request
        self._scheduler.add(request.branches[0])
        return request_id

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
        """The prompt as a list of ints. Raises RequestError for what this engine could not serve."""
        longest, vocab = self.limits.max_model_len, self.limits.vocab_size
        known = token_ids("prompt_token_ids", prompt_token_ids, 2**31 - 1)
        if not known:
            raise RequestError("the prompt is empty")
        if len(known) >= longest:
            raise RequestError(f"the prompt has {len(known):,} tokens, and the context of {longest:,} must hold it and one more")
        named = {"prompt_token_ids": known, "stop_token_ids": params.stop_token_ids or (), "logit_bias": params.logit_bias or ()}
        for name, ids in named.items():
            if max(ids, default=0) >= vocab:
                raise RequestError(f"{name} has {max(ids):,}, and the vocabulary ends at {vocab - 1:,}")
        needed = self._pool.blocks_for(self._limit(len(known), params) - 1)
        if needed > self._pool.num_blocks:
            raise RequestError(
                f"the prompt of {len(known):,} tokens and {params.max_tokens or 'all possible'} more need up to {needed:,} blocks of "
                f"{self._pool.block_size} tokens, and there are {self._pool.num_blocks:,}: ask for fewer, or raise kv_blocks"
            )
        return known

    def step(self) -> list[Update]:
        """Run one step; empty when there is nothing to do, or nothing to say yet."""
        self._check_open()
        flight = self._stepper.launch()
        updates = self._stepper.finish(flight) if flight else []
        for update in updates:
            if update.result:
                self._forget(update.request_id)
        return updates

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, in whatever state, and return what there is of it; None for an id that is not under way."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        updates = self._stepper.end(request, "abort")
        self._forget(request_id)
        return updates[-1].result

    @property
    def has_work(self) -> bool:
        """Whether a request is under way."""
        return bool(self._requests)

    def stats(self) -> Stats:
        """A snapshot."""
        stepper = self._stepper
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_free=self._pool.num_free,
            blocks_total=self._pool.num_blocks,
            steps=stepper.num_steps,
            rows=stepper.num_rows,
            guessed=stepper.num_guessed,
            accepted=stepper.num_accepted,
            proposer_failures=self._proposer.failures,
            preemptions=self._scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Abort all requests and give the memory back. May be called more than once."""
        if not self._closed:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._closed = True
            self._proposer.close()
            self._stepper.executable.close()

    def _branches(self, request: Request) -> list[Branch]:
        """All branches of a request; the first owns the others until its prompt ends."""
        params, prompt = request.params, request.prompt_token_ids
        seed = derive_seed(self.config.seed, request.number) if params.seed is None else params.seed
        sampler = make_sampler(params, prompt, self.limits.vocab_size, seed, end_ids(params, self._tokenizer))
        patterns = [StopPattern(stop) for stop in params.stop or ()]
        max_tokens = request.limit - len(prompt)
        branches = []
        for index in range(params.n):
            output = Output(params, self._tokenizer, patterns, max_tokens)
            branches.append(Branch((request.number, index), request, list(prompt), sampler.clone(index), output))
        branches[0].siblings = branches[1:]
        return branches

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens, prompt and output, at which a branch of the request ends."""
        longest = self.limits.max_model_len
        return longest if params.max_tokens is None else min(longest, prompt_len + params.max_tokens)

    def _forget(self, request_id: str) -> None:
        """Let go of a request that has ended; its branches and it refer to each other."""
        self._requests.pop(request_id).branches.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
