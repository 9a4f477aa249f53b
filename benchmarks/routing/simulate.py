"""Runs the requests of a trace on replicas in simulated time. An event is the arrival of a request
or the end of a step.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np
from policies import Policy
from replica import BLOCK_SIZE, News, Replica
from traces import Conversation, Trace

from headrace.outputs import RequestOutput
from headrace.scaleout.prefix_tree import PrefixTree


@dataclass
class Served:
    """The result of a request."""

    prefix: int
    replica: int
    prompt_len: int
    came: float
    first_token: float = inf
    cached: int = 0
    """Cached prompt tokens."""
    max_cached: int = 0
    """Cached prompt tokens in one replica with infinite memory."""
    row_seconds: float = 0.0
    """Uncached rows times queue time."""


@dataclass
class Simulation:
    """A policy over a trace."""

    policy: Policy
    replicas: list[Replica]
    trace: Trace
    served: dict[str, Served] = field(default_factory=dict)

    def run(self) -> list[Served]:
        """All requests in the order of their arrival."""
        self._events: list[tuple[float, int, object]] = []
        self._count = 0
        self._all = PrefixTree(BLOCK_SIZE)  # what one replica with infinite memory would hold
        self._turns: dict[str, tuple[Conversation, int]] = {}
        for conversation in self.trace:
            self._at(conversation.start, (conversation, 0, []))
        while self._events:
            now, _, event = heappop(self._events)
            match event:
                case (Conversation() as conversation, int(turn), list(said)):
                    self._come(now, conversation, turn, said)
                case (int(number), News() as news):
                    self._finish(number, news)
        return list(self.served.values())

    def _at(self, time: float, event: object) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, event))

    def _come(self, now: float, conversation: Conversation, turn: int, said: list[int]) -> None:
        """Route an arriving request."""
        prompt, request_id = said + conversation.turns[turn].tokens, str(len(self.served))
        number = self.policy.route(request_id, prompt, conversation.scope)
        blocks = self._all.blocks(prompt)
        max_cached = (
            len(self._all.find(blocks[: (len(prompt) - 1) // BLOCK_SIZE], conversation.scope))
            * BLOCK_SIZE
        )
        self._all.insert(0, blocks, conversation.scope, 1 << 60)
        self.served[request_id] = Served(
            conversation.prefix, number, len(prompt), now, max_cached=max_cached
        )
        self._turns[request_id] = conversation, turn
        replica = self.replicas[number]
        replica.add(
            now, request_id, prompt, conversation.turns[turn].num_tokens, conversation.scope
        )
        if not replica.is_busy:
            self._step(now, number)

    def _step(self, now: float, number: int) -> None:
        replica = self.replicas[number]
        replica.is_busy = replica.has_work
        if replica.has_work:
            news = replica.step(now)
            self._at(news.end, (number, news))

    def _finish(self, number: int, news: News) -> None:
        """End a step, and report its results to the policy."""
        for request_id in news.first_tokens:
            self.served[request_id].first_token = news.end
            self.policy.first_token(request_id)
        for result in news.results:
            self._end(news.end, result)
        self._step(news.end, number)

    def _end(self, now: float, result: RequestOutput) -> None:
        served, said = (
            self.served[result.request_id],
            [*result.prompt_token_ids, *result.outputs[0].token_ids],
        )
        served.cached = result.cached_tokens
        served.row_seconds = (served.prompt_len - served.cached) * (
            result.timing.queue + result.timing.prefill / 2
        )
        self.policy.ended(result.request_id, said)
        conversation, turn = self._turns.pop(result.request_id)
        self._all.insert(0, self._all.blocks(said[:-1]), conversation.scope, 1 << 60)
        if turn + 1 < len(conversation.turns):
            self._at(now + conversation.turns[turn + 1].pause, (conversation, turn + 1, said))


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


def figures(served: list[Served], num_replicas: int) -> Figures:
    seconds = np.zeros(num_replicas)
    counts: dict[int, int] = {}
    for one in served:
        seconds[one.replica] += one.row_seconds
        counts[one.prefix] = counts.get(one.prefix, 0) + 1
    recurring = [
        one for one in served if one.prefix >= 0 and counts[one.prefix] >= 10 * num_replicas
    ]
    waits = np.array([one.first_token - one.came for one in served])
    return Figures(
        len(served),
        sum(one.cached for one in served) / sum(one.prompt_len for one in served),
        _ratio(served),
        _ratio(recurring),
        float(seconds.max() / seconds.mean()),
        float(np.percentile(waits, 50)),
        float(np.percentile(waits, 99)),
    )


def _ratio(served: list[Served]) -> float:
    max_cached = sum(one.max_cached for one in served)
    return sum(one.cached for one in served) / max_cached if max_cached else float("nan")
