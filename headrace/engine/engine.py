"""The engine: requests in, updates out. Everything here runs in the caller's thread, and only in
one at a time (`engine/thread.py`).
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from math import inf
from time import perf_counter
from traceback import clear_frames
from types import MappingProxyType
from typing import Any

from headrace.acceptors import Acceptor
from headrace.acceptors.beam import BeamSearch
from headrace.acceptors.independent import IndependentAcceptor
from headrace.backend import Executable
from headrace.config import EngineConfig, KvConfig
from headrace.engine import snapshot
from headrace.engine.adapters import Adapters
from headrace.engine.beginning import begin, begin_again, check_given
from headrace.engine.deadlines import Deadlines
from headrace.engine.finish import fail_request, finish_request
from headrace.engine.jump_forward import JumpForward
from headrace.engine.meter import Meter
from headrace.engine.multi_step import MultiStep
from headrace.engine.output import TokenizerView, end_ids
from headrace.engine.pooling import PromptPooling
from headrace.engine.publish import MOST_BLOCKS, MOST_LINES, VERSION, Publisher
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Stopwatch
from headrace.engine.static import StaticScheduler
from headrace.engine.step import StepLoop
from headrace.errors import ClosedError, RequestError
from headrace.grammar.constraint import Constraints
from headrace.kv.host import HostTier
from headrace.kv.manager import Demand, KvManager
from headrace.outputs import RequestOutput, Update
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.proposer import Proposer
from headrace.record import frozen
from headrace.request import DEFAULT_OPTIONS, CheckedRequest, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.speculation.manager import SpeculationManager
from headrace.stats import BlockMap, Stats
from headrace.validation import token_ids

SCHEDULERS: dict[str, type[Scheduler]] = {"inflight": Scheduler, "static": StaticScheduler}
"""By the name of `EngineConfig.batching`."""

_log = logging.getLogger("headrace.engine")

NO_PROPOSERS: Mapping[str, Proposer] = MappingProxyType({})
"""Plain decoding."""


@frozen
class EngineLimits:
    """What the model and its executable can hold."""

    vocab_size: int
    """Width of a row of logits."""
    max_model_len: int
    """Longest sequence, prompt and output."""
    kv: KvConfig
    kv_groups: tuple[KvGroup, ...]
    """Layers by what they keep and how far back they see."""
    attention_crossover: float = inf
    """Context with which attention takes a row as long as all the rest."""


class Engine:
    """Many requests over one executable. `name` is what `headrace top` calls it; `clock` gives all
    its times, in seconds.
    """

    def __init__(
        self,
        executable: Executable,
        tokenizer: TokenizerView,
        limits: EngineLimits,
        config: EngineConfig,
        proposers: Mapping[str, Proposer] = NO_PROPOSERS,
        name: str = "",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = name
        self.limits = limits
        self.config = config
        self._tokenizer = tokenizer
        self._clock = clock
        host_blocks = (
            executable.host_blocks(config.kv_offload_bytes)
            if config.kv_offload_bytes and config.prefix_cache
            else None
        )
        host = HostTier(host_blocks, limits.kv.block_size)
        self._kv = KvManager(limits.kv_groups, limits.kv, config.max_rows, host)
        self._speculation = SpeculationManager(proposers, config, limits.vocab_size, clock)
        self._scheduler = SCHEDULERS[config.batching](self._kv, config, limits.attention_crossover)
        multi_step = MultiStep(self._scheduler, executable, limits.kv.block_size, config, clock)
        jump_forward = JumpForward(config.max_draft_tokens if config.jump_forward else 0)
        self._loop = StepLoop(
            self._scheduler,
            self._speculation,
            executable,
            self._kv,
            tokenizer,
            multi_step,
            jump_forward,
            clock,
        )
        self._independent = IndependentAcceptor(config.acceptance_method)
        self._adapters = Adapters(executable)
        self._constraints = Constraints(tokenizer, limits.vocab_size)
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._queue_deadlines = Deadlines()
        self._numbers = count()
        self._meter = Meter(clock())
        self._publisher = Publisher(self._record)
        self._started = time.time()
        self._closed = False

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        output_token_ids: Iterable[Iterable[int]] = (),
    ) -> str:
        """Check a request, queue it and return its id: `check` and `add` in one, with their
        arguments and errors.
        """
        self._check_open()
        checked = self.check(
            prompt_token_ids, params, options, prompt=prompt, output_token_ids=output_token_ids
        )
        return self.add(checked, request_id)

    def check(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        prompt: str | None = None,
        pooling: PoolingParams | None = None,
        output_token_ids: Iterable[Iterable[int]] = (),
    ) -> CheckedRequest:
        """The request that these make, fit to be added: see `CheckedRequest` for what they mean.
        One with `pooling` has no `params`.

        `output_token_ids` are of a request that another engine began, with the same seed: it goes
        on behind them to the same tokens. Raises RequestError for what this engine could not serve.
        Queues nothing, and may be called from any thread.
        """
        try:
            params = SamplingParams() if params is None else params
            if not isinstance(params, SamplingParams):
                raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
            options = options.checked()
            if options.adapter is not None:
                self._adapters.check(options.adapter)
            known = self._checked_prompt(prompt_token_ids, params, pooling)
            constraint = (
                None
                if pooling
                else self._constraints.make(params, end_ids(params, self._tokenizer))
            )
            checked = CheckedRequest(
                prompt_token_ids=known,
                params=params,
                prompt=prompt,
                options=options,
                pooling=pooling,
                constraint=constraint,
            )
            most = self._limit(len(known), params, pooling) - len(known)
            return check_given(
                output_token_ids, checked, most, self._tokenizer, self.limits.vocab_size
            )
        except RequestError:
            self._meter.refused += 1
            raise

    def add(
        self, checked: CheckedRequest, request_id: str | None = None, *, only_result: bool = False
    ) -> str:
        """Queue a request that `check` of this engine returned, and return its id; with
        `only_result` it has no update but the last.

        Raises RequestError for an id that is under way, and for an adapter that has been unloaded
        since.
        """
        self._check_open()
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is under way already")
        params, options, pooling = checked.params, checked.options, checked.pooling
        num_prompt_tokens = len(checked.prompt_token_ids)
        adapter = self._adapters.find(options.adapter)
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        request = Request(
            number=number,
            id=request_id,
            prompt=checked.prompt,
            prompt_token_ids=checked.prompt_token_ids,
            params=params,
            limit=self._limit(num_prompt_tokens, params, pooling),
            acceptor=self._acceptor(params),
            stopwatch=Stopwatch(self._clock),
            options=options,
            adapter=adapter,
            pooling=PromptPooling(pooling, num_prompt_tokens) if pooling else None,
            constraint=checked.constraint,
            only_result=only_result,
        )
        seqs = begin(
            request,
            self.config,
            self._tokenizer,
            self.limits.vocab_size,
            checked.output_token_ids,
        )
        self._scheduler.add(seqs)
        self._requests[request_id] = request
        self._adapters.acquire(adapter)

        added = request.stopwatch.added
        if options.timeout is not None:
            self._deadlines.add(added + options.timeout, request)
        if self.config.queue_timeout:
            self._queue_deadlines.add(added + self.config.queue_timeout, request)
        return request_id

    def _checked_prompt(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, pooling: PoolingParams | None
    ) -> list[int]:
        """The prompt as a list of ints."""
        longest, vocab = self.limits.max_model_len, self.limits.vocab_size
        too_many = (
            f"the prompt has {{count}} tokens, and the context of {longest:,} must hold "
            f"it{'' if pooling else ' and one more'}"
        )
        known = token_ids(
            "prompt_token_ids", prompt_token_ids, longest if pooling else longest - 1, too_many
        )
        if not known:
            raise RequestError("the prompt is empty")
        named: dict[str, Iterable[int]] = {"prompt_token_ids": known}
        named |= {
            name: getattr(params, name) or ()
            for name in ("stop_token_ids", "logit_bias", "allowed_token_ids")
        }
        for name, ids in named.items():
            if max(ids, default=0) >= vocab:
                raise RequestError(
                    f"{name} has {max(ids):,}, and the vocabulary ends at {vocab - 1:,}"
                )
        self._check_size(len(known), params, pooling)
        return known

    def step(self, should_stop: Callable[[], bool] = lambda: False) -> list[Update]:
        """Run one step, or several of plain decoding until `should_stop`; empty when there is nothing
        to do, or nothing to say yet.

        An error in the step never leaves it. The requests that have been admitted are recomputed in
        an empty KV cache, each alone at first, and the one with which a step fails again ends with
        the error.
        """
        self._check_open()
        begun, num_tokens, step = self._clock(), -self._loop.num_tokens, None
        updates: list[Update] = []
        try:
            self._expire(updates)
            self._loop.launch(should_stop)
            if self._loop.in_flight:
                step = self._loop.finish(updates)
                self._scheduler.acquit(step.scheduled)
        except Exception as error:
            step = None
            self._recover(error, updates)
        num_tokens += self._loop.num_tokens
        for result in [update.result for update in updates if update.result]:
            if self._requests[result.request_id].acceptor.is_group:
                num_tokens += sum(len(output.token_ids) for output in result.outputs)
            self._meter.finished += 1
            self._forget(result.request_id)
        if step:
            now, num_launches = self._clock(), len(step.tickets)
            self._scheduler.step_timer.record((now - begun) / num_launches)
            self._kv.host.record(step.num_rows, (now - step.started) / num_launches)
            self._meter.step(begun, now, num_tokens, self._loop.num_rows, num_launches)
            self._publisher.tick(now, last=not self._requests)
        return updates

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter whose weights are the model's, for requests that name it. Raises
        RequestError for a name that is taken.
        """
        self._check_open()
        self._adapters.load(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests under way keep it to their end. Raises RequestError for a
        name that is not loaded.
        """
        self._check_open()
        self._adapters.unload(name)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, in whatever state, and return what there is of it; None for an id that is
        not under way.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        finish_request(request, "abort", self._scheduler)
        result = request.result()
        self._meter.aborted += 1
        self._forget(request_id)
        return result

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as the backend holds them; those of draft models and adapters not
        among them.
        """
        return self._loop.executable.program.weight_bytes

    @property
    def has_work(self) -> bool:
        """Whether a request is under way, or a step that has been launched for one."""
        return bool(self._requests or self._loop.in_flight)

    def stats(self) -> Stats:
        """A snapshot."""
        meter, loop, scheduler = self._meter, self._loop, self._scheduler
        tokens_per_second, rows_per_second = meter.rates(self._clock())
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv=snapshot.kv_stats(
                scheduler.running, self._kv, self.limits.kv_groups, self.limits.kv
            ),
            steps=loop.num_steps,
            rows=loop.num_rows,
            rows_last=meter.rows_last,
            step_seconds=meter.step_seconds,
            tokens=meter.latest.tokens,
            tokens_per_second=tokens_per_second,
            rows_per_second=rows_per_second,
            drafted=loop.num_drafted,
            accepted=loop.num_accepted,
            forced=loop.jump_forward.num_accepted,
            drafts=dict(self._speculation.stats),
            proposer_failures=self._speculation.failures,
            failed_steps=meter.failed_steps,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            offloaded_blocks=self._kv.host.num_saved,
            restored_blocks=self._kv.host.num_loaded,
            kv_host_bytes=self._kv.host.num_bytes,
            finished=meter.finished,
            aborted=meter.aborted,
            refused=meter.refused,
            expert_loads=loop.executable.expert_loads().tolist(),
            adapters=self._adapters.users,
        )

    def block_map(self) -> BlockMap:
        """Which sequence holds which block of KV now."""
        return snapshot.block_map(self._scheduler.running, self._kv, self.limits.kv_groups)

    def close(self) -> None:
        """Abort all requests and give the memory back. May be called more than once."""
        if not self._closed:
            self._closed = True
            for request_id in list(self._requests):
                self.abort(request_id)
            self._loop.abandon()
            self._publisher.close()
            self._speculation.close()
            self._kv.host.close()
            self._loop.executable.close()

    def _expire(self, updates: list[Update]) -> None:
        """End the requests whose time is up."""
        now = self._clock()
        overdue = self._deadlines.overdue(now) if self._deadlines else []
        if self._queue_deadlines:
            overdue += [
                request
                for request in self._queue_deadlines.overdue(now)
                if request.stopwatch.started is None
            ]
        for request in dict.fromkeys(overdue):
            finish_request(request, "timeout", self._scheduler)
            updates += request.new_updates()

    def _recover(self, error: Exception, updates: list[Update]) -> None:
        """Let the requests that a failed step may have touched begin again, and end the one that it
        failed of, once that is known.

        Nothing is believed of what was in the middle of a change: steps in flight are forgotten and
        all blocks are free. Where a suspect was among them it was alone in the step.
        """
        self._meter.failed_steps += 1
        clear_frames(
            error.__traceback__
        )  # so that an error that is kept keeps no sequences, and no KV of draft models with them
        self._loop.abandon()
        suspects = self._scheduler.suspects
        touched = self._scheduler.restart(self._requests.values())
        is_found = any(request in suspects for request in touched)
        for request in touched:
            if request in suspects:
                _log.error("a step failed of one request, which ends", exc_info=error)
                fail_request(request, error, self._scheduler)
            elif not request.ended:
                if not is_found:
                    suspects[request] = request.num_tokens
                for seq in begin_again(
                    request,
                    self._acceptor(request.params),
                    self.config,
                    self._tokenizer,
                    self.limits.vocab_size,
                ):
                    self._scheduler.queue(seq)
            updates += request.new_updates()
        if not is_found:
            _log.warning(
                "a step failed: its requests are tried one by one, %d in all",
                len(touched),
                exc_info=error,
            )

    def _check_size(
        self, prompt_len: int, params: SamplingParams, pooling: PoolingParams | None
    ) -> None:
        """Sequences that draw together must fit in a step and in the pool together; of others any
        one, by itself.
        """
        width, size = params.beam_width or 1, self._kv.block_size
        for name, most in (
            ("max_num_seqs", self.config.max_seqs),
            ("max_num_batched_tokens", self.config.max_rows),
        ):
            if width > most:
                raise RequestError(
                    f"beam_width is {width}, and {name} is {most}: search with fewer "
                    "beams, or raise it"
                )
        whole = Demand(self._limit(prompt_len, params, pooling) - 1, 0, width, prompt_len)
        for pool in self._kv.pools:
            if pool.needed(*whole) > pool.num_blocks:
                outputs = (
                    f"{params.max_tokens or 'all possible'} "
                    f"more{f' in each of {width} beams' if width > 1 else ''}"
                )
                more = " needs" if pooling else f" and {outputs} need"
                raise RequestError(
                    f"the prompt of {prompt_len:,} tokens{more} up to "
                    f"{pool.needed(*whole):,} blocks of {size} tokens, "
                    f"and there are {pool.num_blocks:,}: ask for fewer, or raise kv_blocks"
                )

    def _acceptor(self, params: SamplingParams) -> Acceptor:
        if params.beam_width is None:
            return self._independent
        num_end_ids, needs_logits = (
            len(end_ids(params, self._tokenizer)),
            bool(params.stop) or params.logprobs is not None,
        )
        return BeamSearch(
            params.beam_width,
            params.n,
            params.length_penalty,
            params.early_stopping,
            num_end_ids,
            needs_logits,
        )

    def _record(self, with_map: bool) -> dict[str, Any]:
        """What `headrace top` shows, fit for JSON."""
        now = self._clock()
        num_seqs = len(self._scheduler.running) + len(self._scheduler.waiting)
        record: dict[str, Any] = {
            "version": VERSION,
            "pid": os.getpid(),
            "model": self.name,
            "config": self.config.shown | {"max_model_len": self.limits.max_model_len},
            "started": self._started,
            "time": time.time(),
            "stats": self.stats()._asdict(),
            "history": self._meter.history(now),
            "seqs": [
                line._asdict() for line in islice(snapshot.lines(self._scheduler, now), MOST_LINES)
            ],
            "sequences_left_off": max(0, num_seqs - MOST_LINES),
        }
        if with_map and sum(pool.num_blocks for pool in self._kv.pools) <= MOST_BLOCKS:
            record["map"] = self.block_map()._asdict()
        return record

    def _limit(self, prompt_len: int, params: SamplingParams, pooling: PoolingParams | None) -> int:
        """Tokens, prompt and output, at which a sequence of the request ends: one more than have
        KV.
        """
        longest = self.limits.max_model_len
        if pooling:
            return prompt_len + 1
        return (
            longest if params.max_tokens is None else min(longest, prompt_len + params.max_tokens)
        )

    def _forget(self, request_id: str) -> None:
        """Let go of a request that has ended; its sequences and it refer to each other."""
        request = self._requests.pop(request_id)
        self._scheduler.suspects.pop(request, None)
        request.seqs.clear()
        self._deadlines.discard(request)
        self._queue_deadlines.discard(request)
        self._adapters.release(request.adapter)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
