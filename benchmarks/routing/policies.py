"""The policies that are compared. Each is told of a request, of its first token and of its end, and
names the replica.
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
    """The router of the package."""

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
    """The better of two that are drawn at random: the one with fewer requests under way
    (Mitzenmacher 2001).
    """

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
        """It makes no difference."""

    def ended(self, request_id: str, tokens: list[int]) -> None:
        self._running[self._at.pop(request_id)] -= 1


class RoundRobin:
    """One after the other."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._replicas = replicas
        self._count = 0

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        self._count += 1
        return self._count % self._replicas

    def first_token(self, request_id: str) -> None:
        """It makes no difference."""

    def ended(self, request_id: str, tokens: list[int]) -> None:
        """It makes no difference."""


POLICIES = {"headrace": Ours, "power of two": PowerOfTwo, "round robin": RoundRobin}
