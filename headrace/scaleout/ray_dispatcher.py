"""The replicas of a Ray Serve application as a `Dispatcher`."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import grpc
import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from headrace.errors import NoReplicaError
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.replica_status import ReplicaStatus, read_status
from headrace.scaleout.dispatcher import ReplicaLostError, RequestEvent
from headrace.scaleout.equal_workers import EqualWorkers
from headrace.scaleout.ray_router import PrefixRequestRouter, broadcast, router_of

_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 3.0
_COMMAND_SECONDS = 60.0
_ROUTE_SECONDS = 30.0
_TAKEOVER_SECONDS = 70.0
"""More than a request waits for a replica, here and in the fleet."""
_LOST_ERRORS = (RayError, RayServeException, grpc.RpcError)

log = logging.getLogger("headrace.scaleout")


class RayDispatcher:
    def __init__(self, deploy: Callable[[], Any], app: str, fingerprint: Callable[[], str]) -> None:
        """`deploy` returns a handle to the running replicas, or raises EngineDeadError;
        `fingerprint` identifies the required model. Threads call both.
        """
        self._deploy = deploy
        self._fingerprint = fingerprint
        self._model = ""
        self._equal = EqualWorkers("replica", _TAKEOVER_SECONDS)
        self._unequal = set[str]()
        self._app = app
        self._handle: Any = None
        self._statuses: dict[str, ReplicaStatus] = {}
        self._watching: asyncio.Future[None] | None = None
        self._responses: dict[str, Any] = {}
        self._adapters: dict[str, str] = {}
        self._ids = count()
        self._prefix = secrets.token_hex(4)

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        return self._statuses

    @property
    def adapters(self) -> Mapping[str, str]:
        return {
            name: path
            for status in self._statuses.values()
            for name, path in status.adapters.items()
        } | self._adapters

    async def changed(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)  # Ray itself has waited for a place

    async def start(self) -> None:
        self._model = await asyncio.to_thread(self._fingerprint)
        handle = await asyncio.to_thread(self._deploy)
        # Send bytes from process to process, not by the object store: that takes a third of the
        # time.
        self._handle = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        await self._look()
        while not any(replica.accepts_requests for replica in self._statuses.values()):
            await asyncio.sleep(_LOOK_SECONDS / 10)
            await self._look()
        self._watching = asyncio.ensure_future(self._watch())

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        own_id = request.id
        request = msgspec.structs.replace(request, id=f"{self._prefix}-{own_id}")
        messages = self._handle.options(method_name="generate", stream=True).remote(
            frames.encode(request)
        )
        self._responses[request.id] = messages
        progress = _RequestProgress(request)
        try:
            async with asyncio.timeout(_ROUTE_SECONDS) as routing:
                async for message in messages:
                    routing.reschedule(None)
                    for body in frames.bodies(bytearray(message)):
                        event = frames.read_event(body)
                        if isinstance(event, frames.Refused):
                            progress.is_over = True
                            raise RefusedError(event.kind, event.message)
                        assert isinstance(event, RequestEvent), "an event of a request"
                        progress.add(event, self._router)
                        yield msgspec.structs.replace(event, id=own_id)
            if not progress.is_over:
                raise self._lost_error(progress, "the response ended early")
        except TimeoutError:
            raise NoReplicaError(
                "no replica has accepted the request; all are full or starting, retry later"
            ) from None
        except _LOST_ERRORS as error:
            raise self._lost_error(progress, type(error).__name__) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            # The replica has cancelled the call.
            raise self._lost_error(progress, "it ended") from None
        finally:
            del self._responses[request.id]
            if router := self._router:
                router.ended(request.id, progress.tokens if progress.is_over else None)
            if not progress.is_over:
                messages.cancel()

    async def load_adapter(self, name: str, path: str) -> None:
        await self._run_command(partial(_load_adapter, name, path))
        self._adapters[name] = path
        await self._look()

    async def unload_adapter(self, name: str) -> None:
        await self._run_command(lambda request_id: frames.UnloadAdapter(request_id, name))
        self._adapters.pop(name, None)
        await self._look()

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        replies = await self._run_command(frames.MapBlocks)
        return {
            f"replica-{number}": reply
            for number, reply in enumerate(replies)
            if isinstance(reply, frames.Blocks)
        }

    async def close(self) -> None:
        if self._watching:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    @property
    def _router(self) -> PrefixRequestRouter | None:
        return router_of(self._app)

    def _lost_error(self, progress: "_RequestProgress", reason: str) -> ReplicaLostError:
        boot_id = self._router.lost(progress.request.id) if self._router else ""
        message = f"the replica was lost: {reason}"
        return ReplicaLostError(boot_id if progress.is_accepted else "", message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except Exception as error:  # Ray has a problem; requests continue if they can
                log.warning("cannot read the status of the replicas: %s", error)

    async def _look(self) -> None:
        expected = self._router.boot_ids if self._router else set()
        replies = await broadcast(self._handle, "status", seconds=_SILENT_SECONDS)
        statuses = [read_status(_single_body(reply)) for reply in replies]
        # A replica that serves stays the measure for the others.
        statuses.sort(key=lambda status: status.boot_id not in self._statuses)
        equal: dict[str, ReplicaStatus] = {}
        for status in statuses:
            if problem := self._find_problem(status, equal):
                if status.boot_id not in self._unequal:
                    self._unequal.add(status.boot_id)
                    log.error("%s", problem)
            else:
                equal[status.boot_id] = status
        self._statuses = equal

        router = self._router
        if router is None:
            return
        for status in statuses:
            router.observe(status)
        router.silent = (expected & router.boot_ids) - self._statuses.keys()
        for request_id, messages in list(self._responses.items()):
            if router.boot_id_of(request_id) in router.silent:
                messages.cancel()

        for name, path in self._adapters.items():
            if any(name not in status.adapters for status in statuses):
                command = self._encode(partial(_load_adapter, name, path))
                await broadcast(self._handle, "command", command, seconds=_COMMAND_SECONDS)

    def _find_problem(self, status: ReplicaStatus, equal: Mapping[str, ReplicaStatus]) -> str:
        if status.model != self._model:
            return (
                "a replica serves another model or tokenizer than this process and is not used; "
                "make MODEL the same on all nodes"
            )
        if differences := self._equal.differences(status, equal.values()):
            return f"a replica differs from the first one and is not used: {differences}"
        return ""

    def _encode(self, make_command: Callable[[str], frames.Command]) -> bytes:
        return frames.encode(make_command(f"{self._prefix}-command-{next(self._ids)}"))

    async def _run_command(
        self, make_command: Callable[[str], frames.Command]
    ) -> list[frames.Reply]:
        replies = []
        for data in await broadcast(
            self._handle, "command", self._encode(make_command), seconds=_COMMAND_SECONDS
        ):
            event = frames.read_event(_single_body(data))
            if isinstance(event, frames.Refused):
                raise RefusedError(event.kind, event.message)
            assert isinstance(event, frames.Reply)
            replies.append(event)
        return replies


def _load_adapter(name: str, path: str, request_id: str) -> frames.LoadAdapter:
    return frames.LoadAdapter(request_id, name, path)


def _single_body(data: bytes) -> bytes:
    (body,) = frames.bodies(bytearray(data))
    return body


class _RequestProgress:
    def __init__(self, request: frames.Add) -> None:
        self.request = request
        self.is_accepted = self.is_over = False
        self.tokens = request.known_tokens
        self._has_output = False

    def add(self, event: RequestEvent, router: PrefixRequestRouter | None) -> None:
        if isinstance(event, frames.StepOutput) and event.index == 0:
            self.tokens += event.token_ids
        if router and not self._has_output and not isinstance(event, frames.Accepted):
            self._has_output = True
            router.first_token(self.request.id)
        self.is_accepted, self.is_over = True, isinstance(event, frames.Ended)
