"""Which replica a request goes to: the one with the least expected time to its first token.

    (rows that are not cached there + rows queued there) x cost of a row in its steps

A prompt goes where most of it is cached, unless so many rows wait there that another has computed
it before; then that one has it, too. So a prefix is on as many replicas as its traffic needs. Rows
are counted from here: those of a request are queued from its routing to its first token. What
caches hold is remembered in a bounded tree (`prefix_tree.py`), as the replicas' own caches would
keep it.

Times are compared with a weight (`Loads.weighted`), which grows where a replica has had more than
its share of queued row-seconds, so that no replica falls behind (bounded loads: Mirrokni et al.
2018). Times less than a third of a step apart are alike, and the replica with the lowest load is
taken. There is no clock and no chance: the same calls give the same choices.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.errors import NoReplicaError, RequestError
from headrace.record import frozen
from headrace.scaleout.loads import Loads, StepCost
from headrace.scaleout.prefix_tree import PrefixTree, Scope

__all__ = ["PrefixRouter", "Routed", "Scope", "StepCost"]

_ALIKE = 0.3
"""Steps by which expected times may differ and count as alike: how much of a step that runs is done
is not known.
"""


@frozen
class Routed:
    """A request that was sent to a replica."""

    number: int
    """Of the request, in the order of routing."""
    replica: str
    cached_tokens: int
    """First tokens of the prompt that the replica is believed to hold."""
    rows: int
    """Prompt rows that it has to compute."""
    seconds: float
    """Expected time to the first token."""


class _Active(NamedTuple):
    """A request that has not ended."""

    replica: int
    scope: Scope
    prompt_len: int
    rows: int
    """That are queued yet: 0 after the first token."""


class _Replica(NamedTuple):
    """A replica that is there."""

    number: int
    boot_id: str
    max_blocks: int


class PrefixRouter:
    """Routes requests to replicas that come and go. It is used from one thread.

    `block_size`: tokens of a block, as in the replicas' prefix caches; `max_blocks`: most blocks to
    remember of each replica, at best as many as its KV cache has. `first` is the replica that the
    first request goes to where all are alike: routers that run beside each other have different
    ones.
    """

    def __init__(self, block_size: int = 32, max_blocks: int = 4096, first: int = 0) -> None:
        if block_size < 1 or max_blocks < 0:
            raise RequestError(
                f"block_size must be 1 or more and max_blocks 0 or more, not {block_size} "
                f"and {max_blocks}"
            )
        self._tree = PrefixTree(block_size)
        self._max_blocks = max_blocks
        self._next = first
        self._loads = Loads()
        self._replicas: dict[str, _Replica] = {}
        self._names: dict[int, str] = {}
        self._active: dict[int, _Active] = {}
        self._count = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas that are there."""
        return tuple(self._replicas)

    def join(
        self, replica: str, boot_id: str, cost: StepCost, max_blocks: int | None = None
    ) -> None:
        """A replica is there, or says so again, perhaps with another cost. Another `boot_id` is
        another process, which holds nothing yet.
        """
        known = self._replicas.get(replica)
        if known and known.boot_id != boot_id:
            self.leave(replica)
            known = None
        if known:
            self._loads.set_cost(known.number, cost)
        number = known.number if known else self._loads.join(cost)
        self._replicas[replica] = _Replica(
            number, boot_id, self._max_blocks if max_blocks is None else max_blocks
        )
        self._names[number] = replica

    def leave(self, replica: str) -> None:
        """A replica is gone, with what it held and all requests that it had; a name that is not
        there changes nothing.
        """
        gone = self._replicas.pop(replica, None)
        if gone:
            del self._names[gone.number]
            self._tree.drop(gone.number)
            self._loads.leave(gone.number)
            self._active = {
                number: active
                for number, active in self._active.items()
                if active.replica != gone.number
            }

    def route(
        self, tokens: Sequence[int], scope: Scope | None = None, among: Iterable[str] | None = None
    ) -> Routed:
        """Choose a replica for a prompt, and count its rows as queued there. `among`: those that
        may be chosen; None: all.

        Each request is to end, by `ended` or `failed`, or with its replica: until then it counts.
        Raises NoReplicaError where none may be, and RequestError for what is no token id.
        """
        scope = scope or (None, None)
        allowed = self._loads.is_there
        if among is not None:
            allowed = np.zeros(len(allowed), bool)
            allowed[[self._replicas[name].number for name in among if name in self._replicas]] = (
                True
            )
        if not allowed.any():
            raise NoReplicaError(
                "no replica can take the request; wait until one is ready, or start one"
            )
        blocks, length = self._tree.blocks(tokens), len(tokens)
        most = max(0, length - 1) // self._tree.block_size  # the last token is always computed
        found = self._tree.find(blocks[:most], scope)
        cached = self._tree.depths(found, len(allowed)) * self._tree.block_size
        seconds = self._loads.seconds(length - cached)
        weighted = np.where(allowed, self._loads.weighted(seconds), np.inf)
        best = int(weighted.argmin())
        alike = np.flatnonzero(weighted <= weighted[best] + _ALIKE * self._loads.step(best))
        number = self._loads.lowest(alike, self._next)
        self._next = number + 1
        routed = Routed(
            self._count,
            self._names[number],
            int(cached[number]),
            length - int(cached[number]),
            float(seconds[number]),
        )
        self._count += 1
        self._active[routed.number] = _Active(number, scope, length, routed.rows)
        self._loads.begin(number, routed.rows, routed.seconds)
        self._tree.insert(number, blocks, scope, self._replicas[routed.replica].max_blocks, found)
        return routed

    def first_token(self, routed: Routed) -> None:
        """The replica has computed the prompt. Said again, or of a request that has ended, it
        changes nothing.
        """
        active = self._active.get(routed.number)
        if active and active.rows:
            self._loads.first_token(active.replica, active.rows)
            self._loads.trust(active.replica)
            self._active[routed.number] = active._replace(rows=0)

    def ended(self, routed: Routed, tokens: Sequence[int] | None = None) -> None:
        """A request has ended, or is not wanted any more. `tokens`: prompt and output, which the
        replica holds now; None: unknown.
        """
        active = self._active.pop(routed.number, None)
        if active:
            self._loads.first_token(active.replica, active.rows)
            self._loads.end(
                active.replica, None if tokens is None else len(tokens) - active.prompt_len
            )
            if tokens:
                self._tree.insert(
                    active.replica,
                    self._tree.blocks(tokens[:-1]),
                    active.scope,
                    self._replicas[routed.replica].max_blocks,
                )

    def failed(self, routed: Routed) -> None:
        """A request has ended with an error of the replica, which is trusted less until it gives a
        first token again.
        """
        active = self._active.get(routed.number)
        if active:
            self._loads.doubt(active.replica)
            self.ended(routed)

    def report(self, replica: str, queued_rows: int, running: int) -> None:
        """What a replica says of itself: prompt rows that wait, and requests, of all routers. It
        holds until the next report.
        """
        known = self._replicas.get(replica)
        if known:
            self._loads.report(known.number, queued_rows, running)

    def queued_rows(self, replica: str) -> int:
        """Prompt rows that were routed to a replica and have no first token."""
        return self._loads.queued(self._replicas[replica].number)

    def running(self, replica: str) -> int:
        """Requests that were routed to a replica and have not ended."""
        return self._loads.running(self._replicas[replica].number)

    def num_held(self, replica: str) -> int:
        """Blocks that are remembered of a replica."""
        return self._tree.num_held(self._replicas[replica].number)

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered; one that several replicas hold counts once."""
        return len(self._tree)
