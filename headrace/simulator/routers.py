"""Routers of simulated requests. A router chooses a replica, and observes first tokens and ends."""

from typing import Literal, Protocol

import numpy as np

from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.prefix_tree import CacheScope
from headrace.scaleout.replica_speed import ReplicaSpeed

RouterName = Literal["prefix", "two-choices", "round-robin"]


class Router(Protocol):
    """Chooses replicas by number."""

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int: ...

    def first_token(self, request_id: str) -> None: ...

    def ended(self, request_id: str, tokens: list[int] | None) -> None:
        """`tokens`: prompt and output; None if the request was refused."""


class ByPrefix:
    """The router of `headrace route` and of fleets."""

    def __init__(
        self, replicas: int, *, block_size: int, num_blocks: int, speed: ReplicaSpeed
    ) -> None:
        self._router = PrefixRouter(block_size, num_blocks)
        self._routed: dict[str, RoutedRequest] = {}
        for number in range(replicas):
            self._router.join(str(number), "boot", speed)

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        routed = self._routed[request_id] = self._router.route(tokens, scope)
        return int(routed.replica)

    def first_token(self, request_id: str) -> None:
        self._router.first_token(self._routed[request_id])

    def ended(self, request_id: str, tokens: list[int] | None) -> None:
        self._router.ended(self._routed.pop(request_id), tokens)


class TwoChoices:
    """Of two random replicas, the one with fewer running requests (Mitzenmacher 2001)."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._running = [0] * replicas
        self._at: dict[str, int] = {}

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        count = min(2, len(self._running))
        two = self._rng.choice(len(self._running), size=count, replace=False).tolist()
        chosen: int = min(two, key=lambda number: self._running[number])
        self._at[request_id] = chosen
        self._running[chosen] += 1
        return chosen

    def first_token(self, request_id: str) -> None:
        """Ignored."""

    def ended(self, request_id: str, tokens: list[int] | None) -> None:
        self._running[self._at.pop(request_id)] -= 1


class RoundRobin:
    """The replicas in turn."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._count = 0

    def route(self, request_id: str, tokens: list[int], scope: CacheScope) -> int:
        self._count += 1
        return self._count % self._replicas

    def first_token(self, request_id: str) -> None:
        """Ignored."""

    def ended(self, request_id: str, tokens: list[int] | None) -> None:
        """Ignored."""
