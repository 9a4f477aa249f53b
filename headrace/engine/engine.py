"""The engine: requests in, updates out. One thread at a time uses it (`thread.py`)."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count, islice
from math import inf
from time import perf_counter
from traceback import clear_frames
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headrace.acceptors import Acceptor
from headrace.acceptors.beam import BeamSearch
from headrace.acceptors.independent import IndependentAcceptor
from headrace.backend import Executable, instructions
from headrace.config import EngineConfig, KvConfig
from headrace.engine import snapshot
from headrace.engine.adapters import Adapters
from headrace.engine.deadlines import Deadlines
from headrace.engine.finish import fail_request, finish_request
from headrace.engine.in_flight import InFlightStep
from headrace.engine.jump_forward import JumpForward
from headrace.engine.meter import Meter
from headrace.engine.multi_step import MultiStep
from headrace.engine.output import TokenizerView, end_ids
from headrace.engine.pooling import PromptPooling
from headrace.engine.publish import MAX_BLOCKS, MAX_SEQUENCES, VERSION, Publisher
from headrace.engine.request_timer import RequestTimer, WorkTimer
from headrace.engine.resume import check_output_tokens, create_sequences, recreate_sequences
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request
from headrace.engine.static import StaticScheduler
from headrace.engine.step import StepLoop
from headrace.engine.step_sums import StepSums
from headrace.errors import ClosedError, DeviceLostError, RequestError
from headrace.grammar.constraint import Constraints
from headrace.kv.blocks import Demand
from headrace.kv.host import HostTier
from headrace.kv.manager import KvManager
from headrace.outputs import RequestOutput, Update
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.proposer import Proposer
from headrace.record import frozen
from headrace.request import (
    DEFAULT_OPTIONS,
    CheckedRequest,
    PathOptions,
    PoolingParams,
    RequestOptions,
)
from headrace.sampling.sampler import random_seed
from headrace.sampling_params import SamplingParams
from headrace.speculation.manager import SpeculationManager
from headrace.stats import NO_LEARNING, BlockMap, Stats
from headrace.validation import token_ids

if TYPE_CHECKING:
    from headrace.kv.disk import DiskTier
    from headrace.speculation.learning.learner import DraftLearner

SCHEDULERS: dict[str, type[Scheduler]] = {"inflight": Scheduler, "static": StaticScheduler}

NO_PROPOSERS: Mapping[str, Proposer] = MappingProxyType({})

_log = logging.getLogger("headrace.engine")


@frozen
class EngineLimits:
    vocab_size: int
    max_model_len: int
    """Tokens, prompt and output together."""
    kv: KvConfig
    kv_groups: tuple[KvGroup, ...]
    attention_crossover: float = inf
    """Context length at which attention takes as long as the rest of a row."""
    has_head: bool = True
    """False: the model only computes embeddings."""
    memory: int = 0
    """Bytes that were available before the model was loaded; 0: unknown."""
    runtime: int = 0
    """Bytes reserved for everything except weights and KV."""


class Engine:
    """Serves many requests with one executable."""

    def __init__(
        self,
        executable: Executable,
        tokenizer: TokenizerView,
        limits: EngineLimits,
        config: EngineConfig,
        proposers: Mapping[str, Proposer] = NO_PROPOSERS,
        name: str = "",
        clock: Callable[[], float] = perf_counter,
        publishes: bool = True,
        path: str = "",
        mode_price: str = "",
        losses: str = "",
        learner: "DraftLearner[Any] | None" = None,
        disk: "DiskTier | None" = None,
    ) -> None:
        """`clock` gives seconds; `publishes`: whether `headrace top` may watch the engine; `path`:
        that of the model's files, for `headrace top`; `losses`: descriptions of what is lossy, by
        default the configuration's options; `mode_price`: their price; `learner`: trains a
        proposer; `disk`: keeps KV for later runs.
        """
        self.name = name
        self.path = path
        self.mode_price = mode_price
        self.losses = losses or config.lossy
        self.limits = limits
        self.config = config
        self._tokenizer = tokenizer
        self._clock = clock

        self._kv = KvManager(
            limits.kv_groups,
            limits.kv,
            config.max_rows,
            _host_tier(executable, limits, config),
            disk,
        )
        self._speculation = SpeculationManager(proposers, config, limits.vocab_size, clock)
        self.learner = learner
        if learner:
            learner.connect(self._speculation.forget)
        self._scheduler = SCHEDULERS[config.batching](self._kv, config, limits.attention_crossover)
        self._loop = StepLoop(
            scheduler=self._scheduler,
            speculation=self._speculation,
            executable=executable,
            kv=self._kv,
            tokenizer=tokenizer,
            multi_step=MultiStep(self._scheduler, executable, limits.kv.block_size, config, clock),
            jump_forward=JumpForward(config.max_draft_tokens if config.jump_forward else 0),
            clock=clock,
            detokeniser=WorkTimer(clock),
            learner=learner,
        )

        self._independent = IndependentAcceptor(config.acceptance_method)
        self._adapters = Adapters(executable)
        self._constraints = Constraints(tokenizer, limits.vocab_size)
        self._requests: dict[str, Request] = {}
        self._numbers = count()
        self._seed = random_seed() if config.seed is None else config.seed
        self._deadlines = Deadlines()
        self._queue_deadlines = Deadlines()
        self._meter = Meter(clock())
        self._step_sums = StepSums()
        self._publisher = Publisher(self._record) if publishes else None
        self._started = time.time()
        self._closed = False

    @property
    def lossy(self) -> str:
        """Description of what is lossy, with its price; empty if nothing is."""
        price = f" ({self.mode_price})" if self.mode_price else ""
        return self.losses and f"{self.losses}{price}"

    # Requests

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
        """Check a request without queueing it, and return it for `add`.

        With `pooling` the prompt is embedded, and `params` is not used. `output_token_ids` are
        tokens that another engine generated with the same seed; this engine continues after them.

        Raises RequestError. May be called from any thread.
        """
        try:
            params = SamplingParams() if params is None else params
            if not isinstance(params, SamplingParams):
                raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
            if pooling is None and not self.limits.has_head:
                raise RequestError(
                    "the model's files have no head (lm_head.weight), so it computes embeddings "
                    "and generates no text; call embed, or /v1/embeddings of the server"
                )
            options = options.checked()
            if options.adapter is not None:
                self._adapters.check(options.adapter)
            known = self._checked_prompt(prompt_token_ids, params, pooling, options.path)
            if options.path is not None:
                options = replace(options, path=self._checked_path(options.path, known, params))
            constraint = (
                None
                if pooling
                else self._constraints.make(params, end_ids(params, self._tokenizer), known)
            )
            checked = CheckedRequest(
                prompt_token_ids=known,
                params=params,
                prompt=prompt,
                options=options,
                pooling=pooling,
                constraint=constraint,
            )
            return check_output_tokens(
                output_token_ids,
                checked,
                max_tokens=self._limit(len(known), params, pooling, options.path) - len(known),
                tokenizer=self._tokenizer,
                vocab_size=self.limits.vocab_size,
            )
        except RequestError:
            self._meter.refused += 1
            raise

    def add(
        self, checked: CheckedRequest, request_id: str | None = None, *, only_result: bool = False
    ) -> str:
        """Queue a request that `check` returned, and return its id.

        With `only_result` it has a single update. Raises RequestError if the id is in use, or the
        adapter was unloaded.
        """
        self._check_open()
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use; choose another id")
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
            limit=self._limit(num_prompt_tokens, params, pooling, options.path),
            acceptor=self._acceptor(params),
            timer=RequestTimer(self._clock, self._loop.detokeniser),
            options=options,
            adapter=adapter,
            pooling=PromptPooling(pooling, num_prompt_tokens) if pooling else None,
            constraint=checked.constraint,
            score_from=options.path.score_from if options.path else None,
            only_result=only_result,
        )
        seqs = create_sequences(
            request,
            self._seed,
            self._tokenizer,
            self.limits.vocab_size,
            checked.output_token_ids,
        )
        self._scheduler.add(seqs)
        self._requests[request_id] = request
        self._adapters.acquire(adapter)

        added = request.timer.added
        if options.timeout is not None:
            self._deadlines.add(added + options.timeout, request)
        if self.config.queue_timeout:
            self._queue_deadlines.add(added + self.config.queue_timeout, request)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, and return its output so far; None for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        finish_request(request, "abort", self._scheduler)
        result = request.result()
        self._meter.aborted += 1
        self._forget(request_id)
        return result

    def finish(self, request_id: str) -> list[Update]:
        """End a request as a stop string would, and return its last updates; none for an unknown
        id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        finish_request(request, "stop", self._scheduler)
        updates = request.new_updates()
        self._meter.finished += 1
        self._forget(request_id)
        return updates

    def release(self, names: Iterable[str]) -> None:
        """Stop keeping the KV of paths; unknown names are ignored."""
        self._scheduler.release(names)

    def release_all(self, prefix: str) -> None:
        """Stop keeping the KV of all paths whose names begin with `prefix`."""
        self._scheduler.release_all(prefix)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter of the model's own weights. Raises RequestError if the name is taken."""
        self._check_open()
        self._adapters.load(name, adapter)
        if self._kv.disk and (loaded := self._adapters.find(name)):
            self._kv.disk.add_adapter(loaded.scope, adapter)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; unfinished requests keep it. Raises RequestError if it is not
        loaded.
        """
        self._check_open()
        self._adapters.unload(name)

    # Steps

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._loop.in_flight)

    def step(self, should_stop: Callable[[], bool] = lambda: False) -> list[Update]:
        """Run one step, and return its updates.

        Plain decoding may run several steps, until `should_stop()`. After an error all admitted
        requests are recomputed, each alone at first. The request with which a step fails again
        ends with the error. Raises only DeviceLostError: no later step can run.
        """
        self._check_open()
        if self.learner:
            self.learner.begin_step()
        started = self._clock()
        num_tokens_before = self._loop.num_tokens
        updates: list[Update] = []
        step = None
        try:
            self._expire(updates)
            self._loop.launch(should_stop)
            if self._loop.in_flight:
                step = self._loop.finish(updates)
                self._scheduler.clear_suspects(step.scheduled)
        except DeviceLostError:
            raise
        except Exception as error:
            step = None
            self._recover(error, updates)

        num_tokens = self._loop.num_tokens - num_tokens_before
        for result in [update.result for update in updates if update.result]:
            # The tokens of a beam search count when it ends: only then is its output known.
            if self._requests[result.request_id].acceptor.is_group:
                num_tokens += sum(len(output.token_ids) for output in result.outputs)
            self._meter.finished += 1
            self._forget(result.request_id)
        if step:
            self._record_step(step, started, num_tokens)
        if self.learner:
            self.learner.end_step(self.has_work)
        return updates

    def _record_step(self, step: InFlightStep, started: float, num_tokens: int) -> None:
        now, num_launches = self._clock(), len(step.tickets)
        self._scheduler.step_timer.record((now - started) / num_launches)
        self._kv.record(step.num_rows, (now - step.started) / num_launches)
        self._meter.record(
            started,
            now,
            num_tokens=num_tokens,
            total_rows=self._loop.num_rows,
            num_steps=num_launches,
        )
        self._step_sums.record(step, now - started, num_tokens)
        if self._publisher:
            self._publisher.tick(now, last=not self._requests)

    def _expire(self, updates: list[Update]) -> None:
        now = self._clock()
        overdue = self._deadlines.pop_overdue(now) if self._deadlines else []
        if self._queue_deadlines:
            overdue += [
                request
                for request in self._queue_deadlines.pop_overdue(now)
                if request.timer.started is None
            ]
        for request in dict.fromkeys(overdue):
            finish_request(request, "timeout", self._scheduler)
            updates += request.new_updates()

    def _recover(self, error: Exception, updates: list[Update]) -> None:
        """Restart the requests that a failed step may have touched, or fail the culprit."""
        self._meter.failed_steps += 1
        # The caller may keep the error; its frames would keep sequences and draft models alive.
        clear_frames(error.__traceback__)

        self._loop.abandon()
        suspects = self._scheduler.suspects
        touched = self._scheduler.restart(self._requests.values())
        found_culprit = any(request in suspects for request in touched)
        for request in touched:
            if request in suspects:
                _log.error("a step failed because of one request, which ends", exc_info=error)
                fail_request(request, error, self._scheduler)
            elif not request.ended:
                if not found_culprit:
                    suspects[request] = request.num_tokens
                self._restart_request(request)
            updates += request.new_updates()
        if not found_culprit:
            _log.warning(
                "a step failed: its %d requests restart one by one", len(touched), exc_info=error
            )

    def _restart_request(self, request: Request) -> None:
        seqs = recreate_sequences(
            request,
            self._acceptor(request.params),
            self._seed,
            self._tokenizer,
            self.limits.vocab_size,
        )
        for seq in seqs:
            self._scheduler.queue(seq)

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._scheduler.suspects.pop(request, None)
        request.seqs.clear()  # they refer to the request, too
        self._deadlines.discard(request)
        self._queue_deadlines.discard(request)
        self._adapters.release(request.adapter)

    # Statistics

    @property
    def instructions(self) -> str:
        """See `backend.instructions`."""
        return instructions(self.config.backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, without draft models and adapters."""
        return self._loop.executable.program.weight_bytes

    @property
    def kv_share(self) -> float:
        """Share of the blocks that sequences hold, in the fullest KV group."""
        return max((1 - pool.num_free / pool.num_blocks for pool in self._kv.pools), default=0.0)

    def stats(self) -> Stats:
        meter, loop, scheduler, disk = self._meter, self._loop, self._scheduler, self._kv.disk
        rates = meter.rates(self._clock())
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv=snapshot.kv_stats(
                scheduler.running, self._kv, self.limits.kv_groups, self.limits.kv
            ),
            kept_paths=len(scheduler.kept),
            kept_blocks=scheduler.kept.num_blocks,
            steps=loop.num_steps,
            rows=loop.num_rows,
            rows_last=meter.rows_last,
            step_seconds=meter.step_seconds,
            tokens=meter.latest.tokens,
            tokens_per_second=rates.tokens_per_second,
            rows_per_second=rates.rows_per_second,
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
            disk_saved_blocks=disk.num_saved if disk else 0,
            disk_loaded_blocks=disk.num_loaded if disk else 0,
            disk_dropped_blocks=disk.num_dropped if disk else 0,
            kv_disk_bytes=disk.num_bytes if disk else 0,
            grammar_bytes=snapshot.grammar_bytes(self._requests.values()),
            finished=meter.finished,
            aborted=meter.aborted,
            refused=meter.refused,
            expert_loads=loop.executable.expert_loads().tolist(),
            adapters=self._adapters.users,
            adapter_bytes=self._adapters.num_bytes,
            decode_steps=self._step_sums.decode.totals(),
            prompt_steps=self._step_sums.prompt.totals(),
            learning=self.learner.stats() if self.learner else NO_LEARNING,
        )

    def block_map(self) -> BlockMap:
        return snapshot.block_map(self._scheduler.running, self._kv, self.limits.kv_groups)

    def _record(self, with_map: bool) -> dict[str, Any]:
        now = self._clock()
        num_seqs = len(self._scheduler.running) + len(self._scheduler.waiting)
        seqs = islice(snapshot.sequence_stats(self._scheduler, now), MAX_SEQUENCES)
        record: dict[str, Any] = {
            "version": VERSION,
            "pid": os.getpid(),
            "model": self.name,
            "path": self.path,
            "config": self.config.shown
            | {"max_model_len": self.limits.max_model_len, "lossy": self.lossy},
            "started": self._started,
            "time": time.time(),
            "stats": self.stats()._asdict(),
            "history": self._meter.history(now),
            "seqs": [seq._asdict() for seq in seqs],
            "sequences_left_off": max(0, num_seqs - MAX_SEQUENCES),
        }
        if with_map and sum(pool.num_blocks for pool in self._kv.pools) <= MAX_BLOCKS:
            record["map"] = self.block_map()._asdict()
        return record

    # Checks

    def _checked_path(
        self, path: PathOptions, known: list[int], params: SamplingParams
    ) -> PathOptions:
        """Check the options of a session's request. Raises RequestError."""
        for name, value, needed in (
            ("prefix_cache", self.config.prefix_cache, True),
            ("batching", self.config.batching, "inflight"),
        ):
            if value != needed:
                raise RequestError(
                    f"a session needs {name}={needed!r}, but it is {value!r}; set {name}={needed!r}"
                )
        return path.checked(len(known), 1 if path.score_from is not None else params.n)

    def _checked_prompt(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        pooling: PoolingParams | None,
        path: PathOptions | None,
    ) -> list[int]:
        max_model_len, vocab_size = self.limits.max_model_len, self.limits.vocab_size
        too_many = (
            f"the prompt has {{count}} tokens, but max_model_len {max_model_len:,} allows "
            "{limit:,}; shorten the prompt"
        )
        # A prompt that is continued must leave room for one output token.
        is_read_only = pooling or (path and path.score_from is not None)
        max_prompt_len = max_model_len if is_read_only else max_model_len - 1
        known = token_ids("prompt_token_ids", prompt_token_ids, max_prompt_len, too_many)
        if not known:
            raise RequestError("the prompt is empty")

        token_fields: dict[str, Iterable[int]] = {
            "prompt_token_ids": known,
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
        }
        for name, ids in token_fields.items():
            highest = max(ids, default=0)
            if highest >= vocab_size:
                # Fine-tuning may add a token to the tokenizer alone.
                hint = "; the model has no embedding for it" if ids is known else ""
                raise RequestError(
                    f"{name} has token {highest:,}, but the vocabulary ends at "
                    f"{vocab_size - 1:,}{hint}"
                )
        self._check_size(len(known), params, pooling, path)
        return known

    def _check_size(
        self,
        prompt_len: int,
        params: SamplingParams,
        pooling: PoolingParams | None,
        path: PathOptions | None,
    ) -> None:
        """Check that a request can run alone: all beams together, independent sequences one by
        one.
        """
        width = params.beam_width or 1
        limits = {
            "max_num_seqs": self.config.max_seqs,
            "max_num_batched_tokens": self.config.max_rows,
        }
        for name, limit in limits.items():
            if width > limit:
                raise RequestError(
                    f"beam_width {width} exceeds {name} {limit}; use fewer beams or raise {name}"
                )

        demand = Demand(
            num_tokens=self._limit(prompt_len, params, pooling, path) - 1,
            computed=0,
            width=width,
            common=prompt_len,
        )
        for pool in self._kv.pools:
            num_blocks = pool.max_blocks(demand)
            if num_blocks > pool.num_blocks:
                output = f"{params.max_tokens or 'all possible'} output tokens"
                beams = f" in each of {width} beams" if width > 1 else ""
                needs = "needs" if pooling else f"and {output}{beams} need"
                raise RequestError(
                    f"the prompt of {prompt_len:,} tokens {needs} up to {num_blocks:,} blocks of "
                    f"{self._kv.block_size} tokens, but the cache has {pool.num_blocks:,}; "
                    "use fewer tokens or raise kv_blocks"
                )

    def _limit(
        self,
        prompt_len: int,
        params: SamplingParams,
        pooling: PoolingParams | None,
        path: PathOptions | None,
    ) -> int:
        """Return the max length of a sequence: one more than the tokens that need KV."""
        if pooling:
            return prompt_len + 1
        if path and path.score_from is not None:
            return prompt_len
        if params.max_tokens is None:
            return self.limits.max_model_len
        return min(self.limits.max_model_len, prompt_len + params.max_tokens)

    def _acceptor(self, params: SamplingParams) -> Acceptor:
        if params.beam_width is None:
            return self._independent
        return BeamSearch(
            width=params.beam_width,
            num_results=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_ids=sorted(end_ids(params, self._tokenizer)),
            has_stops=bool(params.stop),
            needs_logits=params.logprobs is not None
            or bool(params.stop or params.structured_outputs or params.bad_words)
            or params.thinking_budget is not None,
        )

    # Closing

    def close(self) -> None:
        """Abort all requests and free the memory. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._requests):
            self.abort(request_id)
        self._loop.abandon()
        if self._publisher:
            self._publisher.close()
        if self.learner:
            self.learner.close()
        self._speculation.close()
        self._kv.close()
        self._loop.executable.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")


def _host_tier(executable: Executable, limits: EngineLimits, config: EngineConfig) -> HostTier:
    store = None
    if config.kv_offload_bytes and config.prefix_cache:
        store = executable.host_blocks(config.kv_offload_bytes)
    return HostTier(store, limits.kv.block_size)
