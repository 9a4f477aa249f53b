"""The prefix-aware router as Ray Serve wants it: the one file that touches its request router API,
which is alpha.

Ray makes a router for each handle, tells it which replicas there are, and asks it where a request
goes. The policy answers from memory (`policy.py`), so Ray never waits for it. What Ray does not
tell, a request's first token and its end, the dispatcher of the same handle says here: both run in
one event loop.
"""

import asyncio
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headrace.errors import HeadraceError
from headrace.remote import frames
from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout.policy import PrefixRouter, Routed
from headrace.scaleout.step_times import StepTimes

_routers: "WeakValueDictionary[str, PrefixRequestRouter]" = WeakValueDictionary()
"""Those of this process, by the name of the application whose replicas they choose from."""


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What a replica says of itself once it is ready."""

    boot_id: str
    """Another each time that its process starts: what was cached before is gone."""
    block_size: int
    num_blocks: int
    max_num_seqs: int


class _UnderWay(NamedTuple):
    """A request that was routed."""

    routed: Routed
    boot_id: str


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc] # Ray has no types
    """Sends a request to the replica that is expected to give its first token soonest."""

    def initialize_state(self, **_: Any) -> None:
        """Ray calls it before all else."""
        self._policy: PrefixRouter | None = None
        self._under_way: dict[str, _UnderWay] = {}
        """Requests that have not ended, by their ids."""
        self.silent = set[str]()
        """Boot ids of replicas that do not answer: Ray goes on to name them until its own checks of
        their health have failed.
        """
        self._facts: dict[str, ReplicaFacts] = {}
        self._times: dict[str, StepTimes] = {}
        self._common = StepTimes()
        """Of all replicas together."""
        _routers[self._deployment_id.app_name] = self

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas are these now."""
        super().update_replicas(replicas)
        facts = {
            _name(replica.replica_id): facts_of(replica.replica_metadata) for replica in replicas
        }
        for gone in self._facts.keys() - facts.keys():
            self._leave(gone)
        for name, fact in facts.items():
            self._policy = self._policy or PrefixRouter(fact.block_size)
            self._facts[name] = fact
            self._times.setdefault(name, StepTimes())
            self._join(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is no more."""
        super().on_replica_actor_died(replica_id)
        self._leave(_name(replica_id))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica for a request, alone: Ray asks again where that takes no more."""
        available = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_name = {
            _name(one.replica_id): one for one in available if self._boot_id(one) not in self.silent
        }
        asked = _asked(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # else Ray asks again at once, and for ever
            )
        if asked is None or self._policy is None or not by_name:
            return [list(by_name.values())]
        self.ended(asked.id)  # it was to go elsewhere, and could not
        known = asked.prompt_token_ids + (
            asked.output_token_ids[0] if asked.output_token_ids else []
        )
        try:
            scope = asked.options.cache_salt, asked.options.adapter
            routed = self._policy.route(known, scope, among=by_name.keys())
        except (
            HeadraceError
        ):  # an error here would end Ray's task: the engine says what is wrong with the request
            return [list(by_name.values())]
        self._under_way[asked.id] = _UnderWay(routed, self._facts[routed.replica].boot_id)
        return [[by_name[routed.replica]]]

    def first_token(self, request_id: str) -> None:
        """A request has its first token: the rows of its prompt are not queued any more."""
        one = self._under_way.get(request_id)
        if one and self._policy:
            self._policy.first_token(one.routed)

    def ended(self, request_id: str, tokens: list[int] | None = None) -> None:
        """A request has ended, and left these tokens in the cache of its replica; None: it is not
        known.
        """
        one = self._under_way.pop(request_id, None)
        if one and self._policy:
            self._policy.ended(one.routed, tokens)

    def lost(self, request_id: str) -> str:
        """The replica of a request does not answer: it gets no more until it does. Returns its boot_id
        id, if known.
        """
        one = self._under_way.get(request_id)
        if one is None:
            return ""
        self.silent.add(one.boot_id)
        return one.boot_id

    @property
    def boot_ids(self) -> set[str]:
        """Those of all replicas that there are."""
        return {fact.boot_id for fact in self._facts.values()}

    def boot_id_of(self, request_id: str) -> str:
        """That of the replica which a request is on; empty where it is on none."""
        one = self._under_way.get(request_id)
        return one.boot_id if one else ""

    def hear(self, status: ReplicaStatus) -> None:
        """A replica has said how it is, and so what its steps take."""
        for name in [name for name, fact in self._facts.items() if fact.boot_id == status.boot_id]:
            self._times[name].observe(status.report)
            self._common.observe(status.report)
            self._join(name)

    def _boot(self, replica: RunningReplica) -> str:
        return facts_of(replica.replica_metadata).boot_id

    def _join(self, name: str) -> None:
        fact = self._facts[name]
        assert self._policy
        self._policy.join(
            name,
            fact.boot_id,
            self._times[name].cost(fact.max_num_seqs, self._common),
            fact.num_blocks,
        )

    def _leave(self, name: str) -> None:
        self._facts.pop(name, None)
        self._times.pop(name, None)
        if self._policy:
            self._policy.leave(name)


def router_of(app: str) -> PrefixRequestRouter | None:
    """The router of this process's handle to the replicas of an application; None before its first
    request.
    """
    return _routers.get(app)


async def answers_of(handle: Any, method: str, *arguments: bytes, seconds: float) -> list[bytes]:
    """What a method of all replicas answers within so many seconds. Those that go away meanwhile,
    or take longer, are left out: Ray's own way to wait for a broadcast has no answer at all then.
    """
    try:
        results = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    except RayServeException:  # there is none
        return []
    answering = [asyncio.ensure_future(result.get_async()) for result in results]
    done, late = await asyncio.wait(answering, timeout=seconds)
    for one in late:
        one.cancel()
    return [one.result() for one in done if not one.cancelled() and one.exception() is None]


def metadata_of(facts: ReplicaFacts) -> dict[str, Any]:
    """What a replica says of itself, as Ray carries it."""
    return dict(msgspec.to_builtins(facts))


def facts_of(metadata: dict[str, Any]) -> ReplicaFacts:
    """The reverse."""
    return msgspec.convert(metadata, ReplicaFacts)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _asked(pending: PendingRequest | None) -> frames.Add | None:
    """The request that is to be routed; None for a call of another kind, which may go anywhere."""
    if pending is None or pending.metadata.call_method != "generate":
        return None
    (body,) = frames.bodies(bytearray(pending.args[0]))
    asked = frames.read_command(body)
    return asked if isinstance(asked, frames.Add) else None
