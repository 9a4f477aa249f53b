"""The replicas of an application of Ray Serve, as a fleet uses them: requests go over a handle,
whose router (`ray_router.py`) chooses.
"""

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
from headrace.scaleout.dispatcher import ReplicaLostError
from headrace.scaleout.ray_router import PrefixRequestRouter, answers_of, router_of

_LOOK = 0.5
"""Seconds between two looks at what the replicas say of themselves."""
_SILENT = 3.0
"""Seconds that a replica has to say it, whatever its engine does; else it is taken for lost."""
_ANSWER = 60.0
"""Seconds that replicas have to carry out other commands."""
_ROUTED = 30.0
"""Seconds within which a request must be on a replica."""
_GONE = (RayError, RayServeException, grpc.RpcError)
"""What a call ends with whose replica has gone away, or cannot be reached now."""

log = logging.getLogger("headrace.scaleout")


class RayDispatcher:
    """A `Dispatcher`. It belongs to one event loop."""

    def __init__(self, deploy: Callable[[], Any], app: str, fingerprint: Callable[[], str]) -> None:
        """`deploy` returns a handle to the replicas of the application of this name once there are
        some: it may take long, and raises EngineDeadError where there will be none. `fingerprint`:
        of the model that they must have. Both are called in a thread.
        """
        self._deploy = deploy
        self._fingerprint = fingerprint
        self._model = ""
        self._others = set[str]()
        """Boot ids of replicas that have another model: its name means something else on their
        nodes.
        """
        self._app = app
        self._handle: Any = None
        self._statuses: dict[str, ReplicaStatus] = {}
        self._watching: asyncio.Future[None] | None = None
        self._streams: dict[str, Any] = {}
        """Requests under way, by their ids: what their messages are read from."""
        self._loaded: dict[str, str] = {}
        """Paths of adapters by name, which replicas that start later are told to load as well."""
        self._ids = count()
        self._prefix = secrets.token_hex(4)
        """Of the ids of its requests over there, where those of other frontends are as well."""

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        return self._statuses

    async def start(self) -> None:
        self._model = await asyncio.to_thread(self._fingerprint)
        # Bytes go from process to process, and not by way of an object store: that takes a third of
        # the time.
        handle = await asyncio.to_thread(self._deploy)
        self._handle = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        await self._look()
        while not any(replica.accepts_requests for replica in self._statuses.values()):
            await asyncio.sleep(_LOOK / 10)
            await self._look()
        self._watching = asyncio.ensure_future(self._watch())

    async def generate(
        self, asked: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        own_id = asked.id
        asked = msgspec.structs.replace(asked, id=f"{self._prefix}-{own_id}")
        messages = self._handle.options(method_name="generate", stream=True).remote(
            frames.encode(asked)
        )
        self._streams[asked.id] = messages
        told = _Told(asked)
        try:
            async with asyncio.timeout(_ROUTED) as routing:
                async for message in messages:
                    routing.reschedule(None)
                    for body in frames.bodies(bytearray(message)):
                        event = frames.read_event(body)
                        if isinstance(event, frames.Refused):
                            told.is_over = True
                            raise RefusedError(event.kind, event.message)
                        assert isinstance(
                            event, frames.Accepted | frames.StepOutput | frames.Ended
                        ), "nothing else comes of a request"
                        told.note(event, self._router)
                        yield msgspec.structs.replace(event, id=own_id)
            if not told.is_over:
                raise self._lost(told, "it stopped in the middle of an answer")
        except TimeoutError:
            raise NoReplicaError("no replica has taken the request") from None
        except _GONE as error:
            raise self._lost(told, type(error).__name__) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise self._lost(told, "it ended") from None  # the call was cancelled over there
        finally:
            del self._streams[asked.id]
            if router := self._router:
                router.ended(asked.id, told.tokens if told.is_over else None)
            if not told.is_over:
                messages.cancel()

    async def load_adapter(self, name: str, path: str) -> None:
        await self._command(partial(_load, name, path))
        self._loaded[name] = path
        await self._look()

    async def unload_adapter(self, name: str) -> None:
        await self._command(lambda request_id: frames.UnloadAdapter(request_id, name))
        self._loaded.pop(name, None)
        await self._look()

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        answers = await self._command(frames.MapBlocks)
        return {
            f"replica-{number}": answer
            for number, answer in enumerate(answers)
            if isinstance(answer, frames.Blocks)
        }

    async def close(self) -> None:
        if self._watching:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    @property
    def _router(self) -> PrefixRequestRouter | None:
        return router_of(self._app)

    def _lost(self, told: "_Told", why: str) -> ReplicaLostError:
        boot_id = self._router.lost(told.asked.id) if self._router else ""
        return ReplicaLostError(boot_id if told.is_accepted else "", f"the replica has gone: {why}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self._look()
            except Exception as error:  # Ray itself is not well: requests go on as they can
                log.warning("the replicas could not be asked how they are: %s", error)

    async def _look(self) -> None:
        asked = self._router.boot_ids if self._router else set()
        statuses = [
            read_status(_body(answer))
            for answer in await answers_of(self._handle, "status", seconds=_SILENT)
        ]
        for other in {
            status.boot_id for status in statuses if status.model != self._model
        } - self._others:
            self._others.add(other)
            log.error(
                "a replica has another model or tokenizer than this process, so it is not "
                "used: MODEL must mean the same on all nodes"
            )
        self._statuses = {
            status.boot_id: status for status in statuses if status.model == self._model
        }
        router = self._router
        if router is None:
            return
        for status in statuses:
            router.hear(status)
        router.silent = (asked & router.boot_ids) - self._statuses.keys()
        for request_id, messages in list(self._streams.items()):
            if router.boot_id_of(request_id) in router.silent:
                messages.cancel()
        for name, path in self._loaded.items():
            if any(name not in status.adapters for status in statuses):
                await answers_of(
                    self._handle,
                    "command",
                    self._encoded(partial(_load, name, path)),
                    seconds=_ANSWER,
                )

    def _encoded(self, command: Callable[[str], frames.Command]) -> bytes:
        return frames.encode(command(f"{self._prefix}-command-{next(self._ids)}"))

    async def _command(self, command: Callable[[str], frames.Command]) -> list[frames.Reply]:
        """What all replicas answer. Raises RefusedError where one of them refuses."""
        answers = []
        for data in await answers_of(
            self._handle, "command", self._encoded(command), seconds=_ANSWER
        ):
            event = frames.read_event(_body(data))
            if isinstance(event, frames.Refused):
                raise RefusedError(event.kind, event.message)
            assert isinstance(event, frames.Reply)
            answers.append(event)
        return answers


def _load(name: str, path: str, request_id: str) -> frames.LoadAdapter:
    return frames.LoadAdapter(request_id, name, path)


def _body(data: bytes) -> bytes:
    """The body of the one frame of an answer."""
    (body,) = frames.bodies(bytearray(data))
    return body


class _Told:
    """What has come of a request."""

    def __init__(self, asked: frames.Add) -> None:
        self.asked = asked
        self.is_accepted = self.is_over = False
        self.tokens = asked.prompt_token_ids + (
            asked.output_token_ids[0] if asked.output_token_ids else []
        )
        """Prompt, and the output of its first continuation."""
        self._has_begun = False

    def note(
        self,
        event: frames.Accepted | frames.StepOutput | frames.Ended,
        router: PrefixRequestRouter | None,
    ) -> None:
        """Something has come of it."""
        if isinstance(event, frames.StepOutput) and event.index == 0:
            self.tokens += event.token_ids
        if router and not self._has_begun and not isinstance(event, frames.Accepted):
            self._has_begun = True
            router.first_token(self.asked.id)
        self.is_accepted, self.is_over = True, isinstance(event, frames.Ended)
