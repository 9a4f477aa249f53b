"""Client of one worker over HTTP.

A worker without a status for `_SILENT_SECONDS` is lost, and its requests continue elsewhere. A
proxy may stand before a worker: only a worker's own errors are final.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import NamedTuple, TypeVar

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
_FINAL_STATUSES = (401, 403, 404)
_FULL_CODES = ("server_overloaded", "rate_limit_exceeded")

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
        """Whether it failed at a request after its last status."""
        self.is_full = False
        """Whether it has refused a request, or has said so, since a request ended."""
        self._num_sequences = 0
        self.last_adapters: dict[str, str] = {}
        """Adapters of the last status, also after a loss."""
        self._next_status = asyncio.Event()

    @property
    def accepts_requests(self) -> bool:
        is_accepting = self.status is not None and self.status.accepts_requests
        return is_accepting and not self._is_unsure and not self.problem

    def has_room(self, num_sequences: int) -> bool:
        """Whether it may accept sequences. One request is always sent to an idle worker."""
        limit = self.status.max_sequences if self.status else 0
        is_within = not limit or self._num_sequences + num_sequences <= limit
        return not self.is_full and (is_within or not self._num_sequences)

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
            self._set_next_status()
            self._on_status(self, None)
            await asyncio.sleep(_RETRY_SECONDS)

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        status, session, is_accepted = self.status, self._session, False
        if status is None or session is None:
            raise NoReplicaError(f"{self.url} is not present")
        ended: frames.Ended | None = None
        reason, has_ended_engine = "the response ended early", False
        self._num_sequences += request.num_sequences
        try:
            async with aclosing(self._post(session, msgspec.msgpack.encode(request))) as events:
                async for event in events:
                    if isinstance(event, frames.Refused):
                        if event.kind == "closed":
                            has_ended_engine = True
                            break
                        raise RefusedError(event.kind, event.message)
                    is_accepted = True
                    if isinstance(event, frames.Ended):
                        if event.error and event.error.kind == "rank_lost":
                            reason, is_accepted = event.error.message, False
                            break
                        # Yield it after the body has ended, so the connection can be reused.
                        ended = event
                    elif isinstance(event, frames.Accepted | frames.StepOutput):
                        yield event
        except _FAILURES as error:
            reason = _describe(error)
        finally:
            self._num_sequences -= request.num_sequences
            if is_accepted:
                self.is_full = False
        if ended is not None:
            yield ended
            return
        self._is_unsure = True
        # A worker that was draining has ended on purpose: its end counts as no death.
        is_draining = self.status is not None and self.status.draining
        is_death = is_accepted and not is_draining
        if is_death and not has_ended_engine:
            is_death = await self._has_ended(status.boot_id)
        raise ReplicaLostError(status.boot_id if is_death else "", f"{self.url}: {reason}")

    async def _has_ended(self, boot_id: str) -> bool:
        """Whether the engine of a broken connection has ended: the next status tells."""
        if self.status is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_SECONDS):
                    await self._next_status.wait()
        return self.status is None or self.status.boot_id != boot_id

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
                await self._raise_for_status(response)
                return await response.read()

        try:
            return await self._unless_lost(session, respond())
        except _FAILURES as error:
            raise NoReplicaError(f"{self.url}: {_describe(error)}") from None

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        self.last_adapters = dict(adapters)
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
            if response.status == 404:
                raise NoReplicaError(f"{self.url} responds with status 404: it is no worker")
            await self._raise_for_status(response)
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
                return self._refusal(response.status, (await _error_of(response)).message)
            while chunk := await response.content.readany():
                timeout.reschedule(now() + _SILENT_SECONDS)
                buffer += chunk
                for body in frames.bodies(buffer):
                    self.status, self._is_unsure = read_status(body), False
                    self.was_tried, self.is_full = True, self.status.is_full
                    self.last_adapters = self.status.adapters
                    self._set_next_status()
                    self._on_status(self, self.status)
        return "it ended"

    def _set_next_status(self) -> None:
        self._next_status.set()
        self._next_status = asyncio.Event()

    def _refusal(self, status: int, message: str) -> str:
        """Return why the worker gives no status; only final reasons become its problem."""
        if status not in _FINAL_STATUSES:
            return f"it responds with status {status}: {message}"
        self.problem = f"{self.url} is no worker: start it with `headrace serve --worker`"
        if status != 404:
            self.problem = (
                f"{self.url} refuses this process: {message}; set --worker-key to an "
                "API key of that worker"
            )
        return self.problem

    async def _raise_for_status(self, response: aiohttp.ClientResponse) -> None:
        """Raises NoReplicaError if another worker may serve the request, else RefusedError."""
        status = response.status
        if status == 200:
            return
        error = await _error_of(response)
        if error.code in _FULL_CODES:
            self.is_full = True
            raise NoReplicaError(error.message)
        reason = f"{self.url} responds with status {status}: {error.message}"
        is_own = bool(error.code)
        if is_own and status not in (401, 429) and status < 500:
            raise RefusedError("request", error.message)
        if not is_own and status not in (*_FINAL_STATUSES, 429) and status < 500:
            raise RefusedError("request", f"a proxy refuses the request: {reason}")
        self._is_unsure = True
        if is_own and status == 500:
            raise ReplicaLostError("", reason)
        raise NoReplicaError(reason)


class _Error(NamedTuple):
    code: str
    """Of a worker; empty for an error of a proxy."""
    message: str


async def _error_of(response: aiohttp.ClientResponse) -> _Error:
    try:
        error = msgspec.json.decode(await response.read())["error"]
        return _Error(str(error["code"] or "error"), str(error["message"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return _Error("", response.reason or "an error without a message")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
