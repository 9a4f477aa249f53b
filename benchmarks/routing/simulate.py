"""Requests of a trace through replicas, in simulated time: events in their order, each the coming
of a request or the end of a step.
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
    """What became of a request."""

    prefix: int
    replica: int
    prompt_len: int
    came: float
    first_token: float = inf
    cached: int = 0
    """Prompt tokens that its replica had."""
    most_cached: int = 0
    """Prompt tokens that one replica with infinite memory would have had."""
    row_seconds: float = 0.0
    """Its rows that are not cached, each for as long as it was queued."""


@dataclass
class Simulation:
    """A policy over a trace."""

    policy: Policy
    replicas: list[Replica]
    trace: Trace
    served: dict[str, Served] = field(default_factory=dict)

    def run(self) -> list[Served]:
        """All requests, in the order in which they came."""
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
        """A request comes, and is routed."""
        prompt, request_id = said + conversation.turns[turn].tokens, str(len(self.served))
        number = self.policy.route(request_id, prompt, conversation.scope)
        blocks = self._all.blocks(prompt)
        most = (
            len(self._all.find(blocks[: (len(prompt) - 1) // BLOCK_SIZE], conversation.scope))
            * BLOCK_SIZE
        )
        self._all.insert(0, blocks, conversation.scope, 1 << 60)
        self.served[request_id] = Served(
            conversation.prefix, number, len(prompt), now, most_cached=most
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
        """A step ends, and its news is heard."""
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
    """What is looked at."""

    requests: int
    hit_rate: float
    """Of prompt tokens."""
    of_infinite: float
    """Hit rate to that of one replica with infinite memory."""
    of_infinite_recurring: float
    """The same, over the requests whose prefix comes at least ten times for each replica; nan where
    there are none.
    """
    skew: float
    """Most to mean queued row-seconds of the replicas."""
    p50: float
    p99: float
    """Seconds to the first token."""


def figures(served: list[Served], num_replicas: int) -> Figures:
    """The figures of a run."""
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
    most = sum(one.most_cached for one in served)
    return sum(one.cached for one in served) / most if most else float("nan")
