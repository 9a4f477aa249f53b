"""The compared policies. A policy chooses the replica of a request, and observes its first token
and its end.
"""

from typing import Protocol

import numpy as np
from replica import BLOCK_SIZE, NUM_BLOCKS, fitted_speed

from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.prefix_tree import CacheScope


class Policy(Protocol):
    """Chooses replicas by number."""

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int: ...

    def first_token(self, request_id: str) -> None: ...

    def ended(self, request_id: str, tokens: list[int]) -> None: ...


class Ours:
    def __init__(self, replicas: int, seed: int) -> None:
        self._router = PrefixRouter(BLOCK_SIZE, NUM_BLOCKS)
        self._routed: dict[str, RoutedRequest] = {}
        for number in range(replicas):
            self._router.join(str(number), "boot", fitted_speed())

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        routed = self._routed[request_id] = self._router.route(tokens, scope)
        return int(routed.replica)

    def first_token(self, request_id: str) -> None:
        self._router.first_token(self._routed[request_id])

    def ended(self, request_id: str, tokens: list[int]) -> None:
        self._router.ended(self._routed.pop(request_id), tokens)


class PowerOfTwo:
    """Of two random replicas, the one with fewer running requests (Mitzenmacher 2001)."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._running = [0] * replicas
        self._at: dict[str, int] = {}

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        two = self._rng.choice(len(self._running), size=2, replace=False).tolist()
        chosen = self._at[request_id] = min(two, key=lambda number: self._running[number])
        self._running[chosen] += 1
        return chosen

    def first_token(self, request_id: str) -> None:
        """Ignored."""

    def ended(self, request_id: str, tokens: list[int]) -> None:
        self._running[self._at.pop(request_id)] -= 1


class RoundRobin:
    """The replicas in turn."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._replicas = replicas
        self._count = 0

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        self._count += 1
        return self._count % self._replicas

    def first_token(self, request_id: str) -> None:
        """Ignored."""

    def ended(self, request_id: str, tokens: list[int]) -> None:
        """Ignored."""


POLICIES = {"headrace": Ours, "power of two": PowerOfTwo, "round robin": RoundRobin}
