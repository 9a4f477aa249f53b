"""The prefix-aware router as Ray Serve wants it: the one file that touches its request router API, which is alpha.

Ray makes a router for each handle, tells it which replicas there are, and asks it where a request goes. The policy answers from memory
(`policy.py`), so Ray never waits for it. What Ray does not tell, a request's first token and its end, the dispatcher of the same handle
says here: both run in one event loop.
"""

from typing import Any
from weakref import WeakValueDictionary

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headrace.record import frozen
from headrace.scaleout.policy import PrefixRouter, Routed, StepCost
from headrace.server import frames

_routers: "WeakValueDictionary[str, PrefixRequestRouter]" = WeakValueDictionary()
"""Those of this process, by the name of the application whose replicas they choose from."""


@frozen
class ReplicaFacts:
    """What a replica says of itself once it is ready."""

    boot: str
    """Another each time that its process starts: what was cached before is gone."""
    block_size: int
    num_blocks: int
    cost: StepCost


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc] # Ray has no types
    """Sends a request to the replica that is expected to give its first token soonest."""

    def initialize_state(self, **_: Any) -> None:
        """Ray calls it before all else."""
        self._policy: PrefixRouter | None = None
        self._routed: dict[str, Routed] = {}
        """Where requests are that have not ended, by their ids."""
        _routers[self._deployment_id.app_name] = self

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas are these now."""
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for gone in before - set(self.curr_replicas):
            self._leave(gone)
        for replica in replicas:
            facts = facts_of(replica.replica_metadata)
            self._policy = self._policy or PrefixRouter(block_size=facts.block_size, max_blocks=facts.num_blocks)
            self._policy.join(_name(replica.replica_id), facts.boot, facts.cost)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is no more."""
        super().on_replica_actor_died(replica_id)
        self._leave(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a request, alone: Ray asks again where that takes no more."""
        by_name = {
            _name(replica.replica_id): replica for replica in self.select_available_replicas(candidate_replicas) or candidate_replicas
        }
        asked = _asked(pending_request)
        if asked is None or self._policy is None or not by_name:
            return [list(by_name.values())]
        self.ended(asked.id)  # it was to go elsewhere, and could not
        tokens = asked.prompt_token_ids
        routed = self._policy.route(tokens, (asked.cache_salt, asked.adapter), among=by_name.keys())
        self._routed[asked.id] = routed
        return [[by_name[routed.replica]]]

    def first_token(self, request_id: str) -> None:
        """A request has its first token: the rows of its prompt are not queued any more."""
        routed = self._routed.get(request_id)
        if routed and self._policy:
            self._policy.first_token(routed)

    def ended(self, request_id: str, tokens: list[int] | None = None) -> None:
        """A request has ended, and left these tokens in the cache of its replica; None: nothing."""
        routed = self._routed.pop(request_id, None)
        if routed and self._policy:
            self._policy.ended(routed, tokens or [])

    def lost(self, request_id: str) -> None:
        """The replica of a request does not answer: it gets no more, unless Ray says that it is there."""
        routed = self._routed.get(request_id)
        for replica_id in [one for one in self.curr_replicas if routed and _name(one) == routed.replica]:
            self.on_replica_actor_died(replica_id)

    def _leave(self, replica_id: ReplicaID) -> None:
        if self._policy:
            self._policy.leave(_name(replica_id))


def router_of(app: str) -> PrefixRequestRouter | None:
    """The router of this process's handle to the replicas of an application; None before its first request."""
    return _routers.get(app)


def metadata_of(facts: ReplicaFacts) -> dict[str, Any]:
    """What a replica says of itself, as Ray carries it."""
    return {"boot": facts.boot, "block_size": facts.block_size, "num_blocks": facts.num_blocks, "cost": facts.cost}


def facts_of(metadata: dict[str, Any]) -> ReplicaFacts:
    """The reverse."""
    return ReplicaFacts(**metadata)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _asked(pending: PendingRequest | None) -> frames.Add | None:
    """The request that is to be routed; None for a call of another kind, which may go anywhere."""
    if pending is None or pending.metadata.call_method != "generate":
        return None
    (body,) = frames.bodies(bytearray(pending.args[0]))
    asked = frames.read_command(body)
    return asked if isinstance(asked, frames.Add) else None
