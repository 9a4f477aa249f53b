"""Routes a request to the replica with the least expected time to its first token.

(uncached rows + queued rows) x seconds of a row

Load weights the times (bounded loads: Mirrokni et al. 2018). Equal calls give equal choices.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.errors import NoReplicaError, RequestError
from headrace.record import frozen
from headrace.scaleout.prefix_tree import CacheScope, PrefixTree
from headrace.scaleout.replica_load import ReplicaLoads
from headrace.scaleout.replica_speed import ReplicaSpeed

_TIE_STEPS = 0.3
"""Difference in steps that counts as a tie, since the running step's progress is unknown."""


@frozen
class RoutedRequest:
    number: int
    replica: str
    cached_tokens: int
    rows: int
    seconds: float


class _RunningRequest(NamedTuple):
    replica: int
    scope: CacheScope
    prompt_len: int
    queued_rows: int
    """0 after the first token."""


class _Replica(NamedTuple):
    number: int
    boot_id: str
    max_blocks: int


class PrefixRouter:
    """Routes requests to replicas that join and leave. Not thread-safe.

    `max_blocks`: blocks to remember per replica; `first_replica`: winner of the first tie,
    different for each router.
    """

    def __init__(
        self, block_size: int = 32, max_blocks: int = 4096, first_replica: int = 0
    ) -> None:
        if block_size < 1 or max_blocks < 0:
            raise RequestError(
                f"block_size must be 1 or more and max_blocks 0 or more, not {block_size} "
                f"and {max_blocks}"
            )
        self._tree = PrefixTree(block_size)
        self._max_blocks = max_blocks
        self._next_replica = first_replica
        self._loads = ReplicaLoads()
        self._replicas: dict[str, _Replica] = {}
        self._names: dict[int, str] = {}
        self._running: dict[int, _RunningRequest] = {}
        self._num_requests = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def join(
        self, replica: str, boot_id: str, speed: ReplicaSpeed, max_blocks: int | None = None
    ) -> None:
        """Add a replica, or update its speed. A new `boot_id` means an empty cache."""
        known = self._replicas.get(replica)
        if known and known.boot_id != boot_id:
            self.leave(replica)
            known = None
        if known:
            number = known.number
            self._loads.set_speed(number, speed)
        else:
            number = self._loads.add(speed)
        max_blocks = self._max_blocks if max_blocks is None else max_blocks
        self._replicas[replica] = _Replica(number, boot_id, max_blocks)
        self._names[number] = replica

    def leave(self, replica: str) -> None:
        left = self._replicas.pop(replica, None)
        if left:
            del self._names[left.number]
            self._tree.drop(left.number)
            self._loads.remove(left.number)
            self._running = {
                number: request
                for number, request in self._running.items()
                if request.replica != left.number
            }

    def route(
        self,
        tokens: Sequence[int],
        scope: CacheScope | None = None,
        candidates: Iterable[str] | None = None,
    ) -> RoutedRequest:
        """Choose a replica of `candidates` or of all.

        Raises NoReplicaError without a candidate, RequestError for an invalid token id.
        """
        scope = scope or (None, None)
        allowed = self._loads.is_present
        if candidates is not None:
            allowed = np.zeros(len(allowed), bool)
            numbers = [self._replicas[name].number for name in candidates if name in self._replicas]
            allowed[numbers] = True
        if not allowed.any():
            raise NoReplicaError(
                "no replica can accept the request; wait until one is ready, or start one"
            )

        blocks, length = self._tree.blocks(tokens), len(tokens)
        # The last token is always computed, so its block is never taken from the cache.
        max_cached_blocks = max(0, length - 1) // self._tree.block_size
        path = self._tree.find(blocks[:max_cached_blocks], scope)
        cached = self._tree.depths(path, len(allowed)) * self._tree.block_size

        seconds = self._loads.first_token_seconds(length - cached)
        weighted = np.where(allowed, self._loads.weighted(seconds), np.inf)
        best = int(weighted.argmin())
        tie_seconds = _TIE_STEPS * self._loads.step_seconds(best)
        tied = np.flatnonzero(weighted <= weighted[best] + tie_seconds)
        number = self._loads.least_loaded(tied, self._next_replica)
        self._next_replica = number + 1

        routed = RoutedRequest(
            number=self._num_requests,
            replica=self._names[number],
            cached_tokens=int(cached[number]),
            rows=length - int(cached[number]),
            seconds=float(seconds[number]),
        )
        self._num_requests += 1
        self._running[routed.number] = _RunningRequest(number, scope, length, routed.rows)
        self._loads.begin(number, routed.rows, routed.seconds)
        self._tree.insert(number, blocks, scope, self._replicas[routed.replica].max_blocks, path)
        return routed

    def first_token(self, routed: RoutedRequest) -> None:
        """A late call has no effect."""
        request = self._running.get(routed.number)
        if request and request.queued_rows:
            self._loads.first_token(request.replica, request.queued_rows)
            self._loads.clear_doubt(request.replica)
            self._running[routed.number] = request._replace(queued_rows=0)

    def ended(self, routed: RoutedRequest, tokens: Sequence[int] | None = None) -> None:
        """`tokens`: prompt and output, which are now cached, or None."""
        request = self._running.pop(routed.number, None)
        if request is None:
            return
        self._loads.first_token(request.replica, request.queued_rows)
        output_length = None if tokens is None else len(tokens) - request.prompt_len
        self._loads.end(request.replica, output_length)
        if tokens:
            self._tree.insert(
                request.replica,
                self._tree.blocks(tokens[:-1]),
                request.scope,
                self._replicas[routed.replica].max_blocks,
            )

    def failed(self, routed: RoutedRequest) -> None:
        """The replica gets fewer requests until it recovers."""
        request = self._running.get(routed.number)
        if request:
            self._loads.raise_doubt(request.replica)
            self.ended(routed)

    def observe(self, replica: str, queued_rows: int, running: int) -> None:
        """Set a replica's own counts, which include other routers."""
        known = self._replicas.get(replica)
        if known:
            self._loads.observe(known.number, queued_rows, running)

    def queued_rows(self, replica: str) -> int:
        return self._loads.queued(self._replicas[replica].number)

    def running(self, replica: str) -> int:
        return self._loads.running(self._replicas[replica].number)

    def num_cached(self, replica: str) -> int:
        return self._tree.num_held(self._replicas[replica].number)

    @property
    def num_blocks(self) -> int:
        return len(self._tree)
