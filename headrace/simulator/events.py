"""Runs the requests of a trace on replicas in simulated time. An event is the arrival of a request
or the end of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.simulator.replica import News, Replica
from headrace.simulator.routers import Router
from headrace.simulator.trace import Conversation, Trace


@dataclass(slots=True)
class Served:
    """The result of a request. Times are seconds since the start of the trace."""

    conversation: Conversation
    turn: int
    replica: int
    prompt_len: int
    came: float
    num_tokens: int = 0
    """Output tokens."""
    queue: float = 0.0
    """Seconds until its first step."""
    first_token: float = inf
    ended: float = inf
    cached: int = 0
    """Cached prompt tokens."""
    refused: str = ""
    """Why the engine did not accept it."""


@dataclass
class Simulation:
    """Replicas and their router over a trace."""

    router: Router
    replicas: Sequence[Replica]
    trace: Trace
    on_end: Callable[[int], None] = lambda count: None
    """Receives the number of ended requests."""
    served: dict[str, Served] = field(default_factory=dict)

    def run(self) -> list[Served]:
        """Serve all requests, and return them in the order of their arrival."""
        self._now = 0.0
        self._num_ended = 0
        self._counter = 0
        self._arrivals: list[tuple[float, int, Conversation, int, list[int]]] = []
        """Time, number, conversation, turn, and the tokens of the conversation so far."""
        self._ends: list[tuple[float, int, int, News]] = []
        """Time, number, replica, and results of its step."""
        self._turns: dict[str, tuple[Conversation, int]] = {}
        for conversation in self.trace:
            self._arrivals.append((conversation.start, self._next(), conversation, 0, []))
        heapify(self._arrivals)

        while self._arrivals or self._ends:
            if self._ends and (not self._arrivals or self._ends[0][:2] < self._arrivals[0][:2]):
                _, _, number, news = heappop(self._ends)
                self._finish(number, news)
            else:
                now, _, conversation, turn, said = heappop(self._arrivals)
                self._come(now, conversation, turn, said)
        return list(self.served.values())

    def _next(self) -> int:
        self._counter += 1
        return self._counter

    def _come(self, now: float, conversation: Conversation, turn: int, said: list[int]) -> None:
        """Route an arriving request."""
        own = conversation.turns[turn]
        prompt, request_id = [*said, *own.tokens], str(len(self.served))
        number = self.router.route(request_id, prompt, conversation.scope)
        replica = self.replicas[number]
        served = self.served[request_id] = Served(
            conversation=conversation,
            turn=turn,
            replica=number,
            prompt_len=len(prompt),
            came=now,
        )
        try:
            replica.add(now, request_id, prompt, own.num_tokens, conversation.scope)
        except RequestError as error:  # the conversation ends with it
            served.refused = str(error)
            self.router.ended(request_id, None)
            self._count_end()
            return
        self._turns[request_id] = conversation, turn
        if not replica.is_busy:
            self._step(now, number)

    def _step(self, now: float, number: int) -> None:
        replica = self.replicas[number]
        replica.is_busy = replica.has_work
        if replica.has_work:
            horizon = self._arrivals[0][0] if self._arrivals else inf
            news = replica.step(now, horizon)
            heappush(self._ends, (news.end, self._next(), number, news))

    def _finish(self, number: int, news: News) -> None:
        """End a step, and report its results to the router."""
        for request_id in news.first_tokens:
            self.router.first_token(request_id)
        for result in news.results:
            self._end(news.end, result)
        self._step(news.end, number)

    def _end(self, now: float, result: RequestOutput) -> None:
        served = self.served[result.request_id]
        output = result.outputs[0].token_ids
        timing = result.timing
        served.ended, served.num_tokens = now, len(output)
        served.queue, served.cached = timing.queue, result.cached_tokens
        served.first_token = served.came + timing.queue + timing.prefill
        said = [*result.prompt_token_ids, *output]
        self.router.ended(result.request_id, said)
        self._count_end()

        conversation, turn = self._turns.pop(result.request_id)
        if turn + 1 < len(conversation.turns):
            start = now + conversation.turns[turn + 1].pause
            heappush(self._arrivals, (start, self._next(), conversation, turn + 1, said))

    def _count_end(self) -> None:
        self._num_ended += 1
        self.on_end(self._num_ended)
