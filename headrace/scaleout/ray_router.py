"""The prefix router as a request router of Ray Serve, an alpha API.

The dispatcher reports the first token and the end of requests, which Ray does not.
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
from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.replica_speed import SpeedEstimator

_routers: "WeakValueDictionary[str, PrefixRequestRouter]" = WeakValueDictionary()


class ReplicaMetadata(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    block_size: int
    num_blocks: int
    max_num_seqs: int

    def encode(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self))


class _RunningRequest(NamedTuple):
    routed: RoutedRequest
    boot_id: str


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc] # Ray has no types
    def initialize_state(self, **_: Any) -> None:
        self._prefix_router: PrefixRouter | None = None
        self._routed_requests: dict[str, _RunningRequest] = {}
        self.silent = set[str]()
        """Boot ids of replicas that do not respond, which Ray still lists."""
        self._replica_metadata: dict[str, ReplicaMetadata] = {}
        self._speeds: dict[str, SpeedEstimator] = {}
        self._common_speed = SpeedEstimator()
        _routers[self._deployment_id.app_name] = self

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        present = {_name(replica.replica_id): _metadata_of(replica) for replica in replicas}
        for name in self._replica_metadata.keys() - present.keys():
            self._leave(name)
        for name, metadata in present.items():
            self._prefix_router = self._prefix_router or PrefixRouter(metadata.block_size)
            self._replica_metadata[name] = metadata
            self._speeds.setdefault(name, SpeedEstimator())
            self._join(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._leave(_name(replica_id))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica. Ray calls again if it is full."""
        available = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_name = {
            _name(replica.replica_id): replica
            for replica in available
            if _metadata_of(replica).boot_id not in self.silent
        }
        request = _request_of(pending_request)
        if pending_request is not None:
            # Without a backoff Ray calls again at once, without end.
            pending_request.routing_context.should_backoff = True
        if request is None or self._prefix_router is None or not by_name:
            return [list(by_name.values())]

        self.ended(request.id)  # Ray could not place it where it was routed before
        scope = request.options.cache_salt, request.options.adapter
        try:
            routed = self._prefix_router.route(
                request.known_tokens, scope, candidates=by_name.keys()
            )
        except HeadraceError:
            # An error here would end Ray's task. The engine will refuse the request.
            return [list(by_name.values())]
        boot_id = self._replica_metadata[routed.replica].boot_id
        self._routed_requests[request.id] = _RunningRequest(routed, boot_id)
        return [[by_name[routed.replica]]]

    def first_token(self, request_id: str) -> None:
        request = self._routed_requests.get(request_id)
        if request and self._prefix_router:
            self._prefix_router.first_token(request.routed)

    def ended(self, request_id: str, tokens: list[int] | None = None) -> None:
        """End a request; `tokens` are now cached, None if unknown."""
        request = self._routed_requests.pop(request_id, None)
        if request and self._prefix_router:
            self._prefix_router.ended(request.routed, tokens)

    def lost(self, request_id: str) -> str:
        request = self._routed_requests.get(request_id)
        if request is None:
            return ""
        self.silent.add(request.boot_id)
        return request.boot_id

    @property
    def boot_ids(self) -> set[str]:
        return {metadata.boot_id for metadata in self._replica_metadata.values()}

    def boot_id_of(self, request_id: str) -> str:
        request = self._routed_requests.get(request_id)
        return request.boot_id if request else ""

    def observe(self, status: ReplicaStatus) -> None:
        names = [
            name
            for name, known in self._replica_metadata.items()
            if known.boot_id == status.boot_id
        ]
        for name in names:
            self._speeds[name].observe(status.report)
            self._common_speed.observe(status.report)
            self._join(name)

    def _join(self, name: str) -> None:
        metadata = self._replica_metadata[name]
        assert self._prefix_router
        self._prefix_router.join(
            name,
            boot_id=metadata.boot_id,
            speed=self._speeds[name].estimate(metadata.max_num_seqs, self._common_speed),
            max_blocks=metadata.num_blocks,
        )

    def _leave(self, name: str) -> None:
        self._replica_metadata.pop(name, None)
        self._speeds.pop(name, None)
        if self._prefix_router:
            self._prefix_router.leave(name)


def router_of(app: str) -> PrefixRequestRouter | None:
    return _routers.get(app)


async def broadcast(handle: Any, method: str, *arguments: bytes, seconds: float) -> list[bytes]:
    """Call all replicas; returns the results that arrive within `seconds`."""
    try:
        results = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    except RayServeException:  # there is no replica
        return []
    tasks = [asyncio.ensure_future(result.get_async()) for result in results]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    return [task.result() for task in done if not task.cancelled() and task.exception() is None]


def _metadata_of(replica: RunningReplica) -> ReplicaMetadata:
    return msgspec.convert(replica.replica_metadata, ReplicaMetadata)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _request_of(pending: PendingRequest | None) -> frames.Add | None:
    if pending is None or pending.metadata.call_method != "generate":
        return None
    (body,) = frames.bodies(bytearray(pending.args[0]))
    command = frames.read_command(body)
    return command if isinstance(command, frames.Add) else None
