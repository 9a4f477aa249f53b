"""Client of one worker over HTTP.

A worker without a status for `_SILENT_SECONDS` is lost, and its requests continue elsewhere.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from headrace.errors import NoReplicaError
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.replica_status import ReplicaStatus, read_status
from headrace.scaleout.dispatcher import ReplicaLostError, RequestEvent

_SILENT_SECONDS = 3.0
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.25
_KEEPALIVE_SECONDS = 30.0

_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError)

_T = TypeVar("_T")

log = logging.getLogger("headrace.scaleout")


class HttpWorker:
    def __init__(
        self, url: str, key: str, on_status: Callable[["HttpWorker", ReplicaStatus | None], None]
    ) -> None:
        """`on_status` gets each status, and None if the worker is not present."""
        self.url = url
        self.status: ReplicaStatus | None = None
        self.problem = ""
        """Why a worker that responds is not used."""
        self.was_tried = False
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._on_status = on_status
        self._session: aiohttp.ClientSession | None = None
        self._timeouts = set[asyncio.Timeout]()
        self._is_unsure = False

    @property
    def accepts_requests(self) -> bool:
        is_accepting = self.status is not None and self.status.accepts_requests
        return is_accepting and not self._is_unsure and not self.problem

    async def watch(self) -> None:
        reason = ""
        while True:
            last_reason = reason
            try:
                async with self._connected() as session:
                    reason = await self._read_statuses(session)
            except _FAILURES as error:
                reason = _describe(error)
            if self.status is not None:
                log.warning("%s is lost: %s", self.url, reason)
            elif reason != last_reason:
                log.info("%s is not present yet: %s", self.url, reason)
            self.status, self.was_tried = None, True
            self._on_status(self, None)
            await asyncio.sleep(_RETRY_SECONDS)

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        status, session, is_accepted = self.status, self._session, False
        if status is None or session is None:
            raise NoReplicaError(f"{self.url} is not present")
        ended: frames.Ended | None = None
        reason = "the response ended early"
        try:
            async with aclosing(self._post(session, msgspec.msgpack.encode(request))) as events:
                async for event in events:
                    if isinstance(event, frames.Refused):
                        if event.kind == "closed":
                            break
                        raise RefusedError(event.kind, event.message)
                    is_accepted = True
                    if isinstance(event, frames.Ended):
                        # Yield it after the body has ended, so the connection can be reused.
                        ended = event
                    elif isinstance(event, frames.Accepted | frames.StepOutput):
                        yield event
        except _FAILURES as error:
            reason = _describe(error)
        if ended is not None:
            yield ended
            return
        self._is_unsure = True
        # A worker that was draining has ended on purpose: its end counts as no death.
        is_draining = self.status is not None and self.status.draining
        boot_id = status.boot_id if is_accepted and not is_draining else ""
        raise ReplicaLostError(boot_id, f"{self.url}: {reason}")

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        """Call a route. Raises RefusedError, and NoReplicaError without a worker."""
        session = self._session
        if session is None:
            raise NoReplicaError(f"{self.url} is not present")
        data = None if body is None else msgspec.json.encode(body)

        async def respond() -> bytes:
            async with session.request(
                method, self.url + path, data=data, headers={"content-type": "application/json"}
            ) as response:
                await _raise_for_status(response)
                return await response.read()

        try:
            return await self._unless_lost(session, respond())
        except _FAILURES as error:
            raise NoReplicaError(f"{self.url}: {_describe(error)}") from None

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        if self.status is not None:
            self.status = msgspec.structs.replace(self.status, adapters=dict(adapters))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            auto_decompress=False,
        ) as session:
            self._session = session
            try:
                yield session
            finally:
                self._session = None
                for timeout in self._timeouts:
                    timeout.reschedule(asyncio.get_running_loop().time())

    async def _post(
        self, session: aiohttp.ClientSession, body: bytes
    ) -> AsyncGenerator[frames.Event]:
        posted = session.post(
            f"{self.url}/worker/generate", data=body, headers={"content-type": frames.CONTENT_TYPE}
        )
        response = await self._unless_lost(session, posted)
        try:
            await _raise_for_status(response)
            buffer = bytearray()
            while chunk := await self._unless_lost(session, response.content.readany()):
                buffer += chunk
                for frame in frames.bodies(buffer):
                    yield frames.read_event(frame)
        finally:
            response.close()  # aborts a request whose response was not read to its end

    async def _unless_lost(self, session: aiohttp.ClientSession, work: Awaitable[_T]) -> _T:
        """Await `work`. Raises TimeoutError if the worker is lost, because closing wakes no
        reader.
        """
        async with asyncio.timeout(None if session is self._session else 0) as timeout:
            self._timeouts.add(timeout)
            try:
                return await work
            finally:
                self._timeouts.discard(timeout)

    async def _read_statuses(self, session: aiohttp.ClientSession) -> str:
        buffer, now = bytearray(), asyncio.get_running_loop().time
        async with (
            asyncio.timeout(_SILENT_SECONDS) as timeout,
            session.get(f"{self.url}/worker/status") as response,
        ):
            if response.status != 200:
                self._set_problem(response.status, await _error_message(response))
                return self.problem
            while chunk := await response.content.readany():
                timeout.reschedule(now() + _SILENT_SECONDS)
                buffer += chunk
                for body in frames.bodies(buffer):
                    self.status, self._is_unsure = read_status(body), False
                    self.was_tried = True
                    self._on_status(self, self.status)
        return "it ended"

    def _set_problem(self, status: int, message: str) -> None:
        if status in (401, 403):
            self.problem = (
                f"{self.url} refuses this process: {message}; set --worker-key to an "
                "API key of that worker"
            )
        elif status == 404:
            self.problem = f"{self.url} is no worker: start it with `headrace serve --worker`"
        else:
            self.problem = f"{self.url} responds with status {status}: {message}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    message = await _error_message(response)
    if response.status in (429, 503):
        raise NoReplicaError(message)
    raise RefusedError("request" if response.status < 500 else "internal", message)


async def _error_message(response: aiohttp.ClientResponse) -> str:
    try:
        return str(msgspec.json.decode(await response.read())["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.reason or "an error without a message"
