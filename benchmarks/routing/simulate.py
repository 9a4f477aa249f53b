"""Runs a trace under a policy, and compares its hits with those of one replica with infinite
memory.
"""

from dataclasses import dataclass, field

import numpy as np
from replica import BLOCK_SIZE, SETUP

from headrace.scaleout.prefix_tree import CacheScope, PrefixTree
from headrace.simulator.events import Served, Simulation
from headrace.simulator.replica import Replica
from headrace.simulator.routers import Router
from headrace.simulator.trace import Trace


@dataclass
class Observed:
    """A policy, and the prompt tokens that one replica with infinite memory would have cached."""

    policy: Router
    max_cached: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = PrefixTree(BLOCK_SIZE)
        self._scopes: dict[str, CacheScope] = {}

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        number = self.policy.route(request_id, tokens, scope)
        blocks = self._all.blocks(tokens)
        found = self._all.find(blocks[: (len(tokens) - 1) // BLOCK_SIZE], scope)
        self.max_cached[request_id] = len(found) * BLOCK_SIZE
        self._scopes[request_id] = scope
        self._all.insert(0, blocks, scope, 1 << 60)
        return number

    def first_token(self, request_id: str) -> None:
        self.policy.first_token(request_id)

    def ended(self, request_id: str, tokens: list[int] | None) -> None:
        self.policy.ended(request_id, tokens)
        scope = self._scopes.pop(request_id)
        if tokens:
            self._all.insert(0, self._all.blocks(tokens[:-1]), scope, 1 << 60)


@dataclass
class Figures:
    """The figures of a run."""

    requests: int
    hit_rate: float
    """Share of prompt tokens."""
    of_infinite: float
    """Hit rate relative to one replica with infinite memory."""
    of_infinite_recurring: float
    """The relative hit rate of requests with a prefix that occurs at least ten times per replica;
    NaN if there are no such requests.
    """
    skew: float
    """Max divided by mean of the queued row-seconds of the replicas."""
    p50: float
    p99: float
    """Seconds to the first token."""


def run(policy: Router, num_replicas: int, trace: Trace) -> Figures:
    observed = Observed(policy)
    replicas = [Replica(SETUP, number) for number in range(num_replicas)]
    simulation = Simulation(observed, replicas, trace)
    served, max_cached = simulation.run(), list(observed.max_cached.values())

    seconds = np.zeros(num_replicas)
    counts: dict[int, int] = {}
    for one in served:
        prefill = one.first_token - one.came - one.queue
        seconds[one.replica] += (one.prompt_len - one.cached) * (one.queue + prefill / 2)
        prefix = one.conversation.prefix
        counts[prefix] = counts.get(prefix, 0) + 1
    recurring = [
        index
        for index, one in enumerate(served)
        if (prefix := one.conversation.prefix) >= 0 and counts[prefix] >= 10 * num_replicas
    ]
    waits = np.array([one.first_token - one.came for one in served])
    return Figures(
        len(served),
        sum(one.cached for one in served) / sum(one.prompt_len for one in served),
        _ratio(served, max_cached, list(range(len(served)))),
        _ratio(served, max_cached, recurring),
        float(seconds.max() / seconds.mean()),
        float(np.percentile(waits, 50)),
        float(np.percentile(waits, 99)),
    )


def _ratio(served: list[Served], max_cached: list[int], chosen: list[int]) -> float:
    total = sum(max_cached[index] for index in chosen)
    return sum(served[index].cached for index in chosen) / total if total else float("nan")
