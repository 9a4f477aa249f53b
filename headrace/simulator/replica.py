"""A replica in simulated time: the engine over an executable without arithmetic."""

from math import inf
from typing import NamedTuple

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.outputs import RequestOutput
from headrace.program.op import StepSize
from headrace.proposer import Proposer
from headrace.record import frozen
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.scaleout.prefix_tree import CacheScope
from headrace.scaleout.replica_speed import ReplicaSpeed
from headrace.simulator.clock import VirtualClock
from headrace.simulator.drafts import ChainDrafts
from headrace.simulator.executable import StepCosts, TimedExecutable
from headrace.simulator.vocabulary import Textless

_TYPICAL_CONTEXT = 1500


@frozen(kw_only=True)
class ReplicaSetup:
    """All that replicas have in common."""

    limits: EngineLimits
    config: EngineConfig
    costs: StepCosts
    kv_bytes: float
    """Bytes of a stored key or value number."""
    max_in_flight: int = 1
    draft_depth: int = 0
    draft_acceptance: float = 0.0
    seed: int = 0

    def speed(self) -> ReplicaSpeed:
        """The speed that a router assumes: of an empty step, a full chunk and a typical context."""
        chunk = self.config.max_chunk_rows
        empty, full = self._seconds((0, 1)), self._seconds((0, chunk))
        return ReplicaSpeed(
            step_seconds=empty,
            row_seconds=(full - empty) / chunk,
            sequence_seconds=max(0.0, self._seconds((_TYPICAL_CONTEXT, 1)) - empty),
            chunk_size=chunk,
            max_num_seqs=self.config.max_seqs,
        )

    def _seconds(self, seq: tuple[int, int]) -> float:
        return sum(self.costs.stage_seconds(StepSize((seq,), 1, self.kv_bytes)))


class News(NamedTuple):
    """The requests that got their first token in a step, and the requests that ended."""

    end: float
    first_tokens: list[str]
    results: list[RequestOutput]


class Occupancy:
    """Mean and maximum of a share over time."""

    def __init__(self) -> None:
        self.max = 0.0
        self._sum = 0.0

    def record(self, share: float, seconds: float) -> None:
        self.max = max(self.max, share)
        self._sum += share * seconds

    def mean(self, seconds: float) -> float:
        return self._sum / seconds if seconds else 0.0


class Replica:
    """An engine, and the end of its running step."""

    def __init__(
        self, setup: ReplicaSetup, number: int = 0, *, tells_first_tokens: bool = True
    ) -> None:
        """`tells_first_tokens`: whether a router needs them before the request ends."""
        self._tells_first_tokens = tells_first_tokens
        self._clock = VirtualClock()
        executable = TimedExecutable(
            self._clock,
            setup.costs,
            kv_bytes=setup.kv_bytes,
            max_in_flight=setup.max_in_flight,
            acceptance=setup.draft_acceptance,
            rng=np.random.default_rng([setup.seed, number]),
        )
        proposers: dict[str, Proposer] = {}
        if setup.draft_depth:
            proposers["drafts"] = ChainDrafts(setup.draft_depth, setup.draft_acceptance)
        self._engine = Engine(
            executable,  # type: ignore[arg-type]
            Textless(),
            setup.limits,
            setup.config,
            proposers,
            clock=self._clock,
            publishes=False,
        )
        self._costs = setup.costs
        self._request_seconds = 0.0
        """Seconds of work on new requests, before the next step."""
        self._waiting = set[str]()
        self._horizon = inf
        self.is_busy = False
        self.busy_seconds = 0.0
        self.kv = Occupancy()

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return self._engine.has_work

    def add(
        self, now: float, request_id: str, prompt: list[int], num_tokens: int, scope: CacheScope
    ) -> None:
        """Queue a request at a time. Raises RequestError if it does not fit."""
        self._clock.now = now
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        checked = self._engine.check(prompt, params, RequestOptions(cache_salt=scope[0]))
        self._engine.add(checked, request_id, only_result=not self._tells_first_tokens)
        self._request_seconds += self._costs.request_seconds
        if self._tells_first_tokens:
            self._waiting.add(request_id)

    def step(self, now: float, horizon: float = inf) -> News:
        """Run a step that starts at a time, and return the results at its end.

        The next request may come at `horizon`, which ends a run of plain steps.
        """
        self._clock.now, self._horizon = now + self._request_seconds, horizon
        self._request_seconds = 0.0
        updates = self._engine.step(self._has_news)
        end = self._clock.now
        self.busy_seconds += end - now
        self.kv.record(self.kv_share, end - now)

        results = [update.result for update in updates if update.result]
        for result in results:
            if result.error:
                raise result.error
        begun = list[str]()
        if self._waiting:
            begun = sorted({u.request_id for u in updates if u.token_ids} & self._waiting)
            self._waiting.difference_update(begun)
        return News(end, begun, results)

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks that sequences hold."""
        return self._engine.kv_share

    def _has_news(self) -> bool:
        return self._clock.now >= self._horizon

    @property
    def stats(self) -> "ReplicaStats":
        stats = self._engine.stats()
        return ReplicaStats(
            steps=stats.steps,
            rows=stats.rows,
            preemptions=stats.preemptions,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            drafted=stats.drafted,
            accepted=stats.accepted,
        )


class ReplicaStats(NamedTuple):
    """Counters of an engine."""

    steps: int
    rows: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
