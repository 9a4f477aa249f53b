"""One worker, `headrace serve --worker`, over HTTP: what it says of itself, and requests that it
runs.

There is one connection for its status, which it says several times a second, and one for each
request, from a pool. A worker that is silent for some seconds is taken for lost: all connections to
it are closed, and so its requests go on elsewhere.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from headrace.errors import NoReplicaError
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.replica_status import ReplicaStatus, read_status
from headrace.scaleout.dispatcher import ReplicaLostError

_SILENT = 3.0
"""Seconds without a word after which a worker is lost."""
_CONNECT = 2.0
"""Seconds that a connection may take."""
_PAUSE = 0.25
"""Seconds between two tries to reach a worker."""
_KEPT_OPEN = 30.0
"""Seconds that a connection is kept for the next request: fewer than a worker keeps it."""

_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError)
"""What comes of a worker that goes away, or writes what is no frame."""

_T = TypeVar("_T")

log = logging.getLogger("headrace.scaleout")


class HttpWorker:
    """A worker at a URL, as far as it is there."""

    def __init__(
        self, url: str, key: str, on_status: Callable[["HttpWorker", ReplicaStatus | None], None]
    ) -> None:
        """`on_status` hears everything that it says, and None when it is lost, or is not there."""
        self.url = url
        self.status: ReplicaStatus | None = None
        """What it said last; None where it is not there."""
        self.problem = ""
        """Why it is not used, although it answers."""
        self.tried = False
        """Whether it was reached, or could not be, once at least."""
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._on_status = on_status
        self._session: aiohttp.ClientSession | None = None
        self._waiting = set[asyncio.Timeout]()
        """Of all that waits for it."""
        self._unsure = False
        """Whether a request was lost since it said its last word."""

    @property
    def accepts_requests(self) -> bool:
        """Whether requests may be sent to it."""
        return (
            self.status is not None
            and self.status.accepts_requests
            and not self._unsure
            and not self.problem
        )

    async def watch(self) -> None:
        """Keep up the connection to it, until this is cancelled."""
        why = ""
        while True:
            before = why
            try:
                async with self._connected() as session:
                    why = await self._listen(session)
            except _FAILURES as error:
                why = _told(error)
            if self.status is not None:
                log.warning("%s is lost: %s", self.url, why)
            elif why != before:
                log.info("%s is not there yet: %s", self.url, why)
            self.status, self.tried = None, True
            self._on_status(self, None)
            await asyncio.sleep(_PAUSE)

    async def generate(
        self, asked: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        """Run a request there: see `Dispatcher.generate`."""
        status, session, is_accepted = self.status, self._session, False
        if status is None or session is None:
            raise NoReplicaError(f"{self.url} is not there")
        ended: frames.Ended | None = None
        why = "it ended in the middle of an answer"
        try:
            async with aclosing(self._answer(session, msgspec.msgpack.encode(asked))) as events:
                async for event in events:
                    if isinstance(event, frames.Refused):
                        if event.kind == "closed":
                            break
                        raise RefusedError(event.kind, event.message)
                    is_accepted = True
                    if isinstance(event, frames.Ended):
                        # which is handed on once the body has ended, so that its connection serves
                        # the next request
                        ended = event
                    elif isinstance(event, frames.Accepted | frames.StepOutput):
                        yield event
        except _FAILURES as error:
            why = _told(error)
        if ended is not None:
            yield ended
            return
        self._unsure = True
        is_meant = self.status is not None and self.status.draining
        raise ReplicaLostError(
            status.boot_id if is_accepted and not is_meant else "", f"{self.url}: {why}"
        )

    async def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """What a route of its answers. Raises RefusedError for an error, and NoReplicaError where
        it is not there.
        """
        session = self._session
        if session is None:
            raise NoReplicaError(f"{self.url} is not there")
        data = None if body is None else msgspec.json.encode(body)

        async def answer() -> bytes:
            async with session.request(
                method, self.url + path, data=data, headers={"content-type": "application/json"}
            ) as response:
                await _check(response)
                return await response.read()

        try:
            return await self._unless_lost(session, answer())
        except _FAILURES as error:
            raise NoReplicaError(f"{self.url}: {_told(error)}") from None

    def know(self, **changes: Any) -> None:
        """Change what it said, where it is known to be different now."""
        if self.status is not None:
            self.status = msgspec.structs.replace(self.status, **changes)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Connections of its own, which are all closed with the context, also those that are read
        from.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_OPEN)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False
        ) as session:
            self._session = session
            try:
                yield session
            finally:
                self._session = None
                for limit in self._waiting:
                    limit.reschedule(asyncio.get_running_loop().time())

    async def _answer(
        self, session: aiohttp.ClientSession, body: bytes
    ) -> AsyncGenerator[frames.Event]:
        """The frames that it answers a request with, as they come."""
        posted = session.post(
            f"{self.url}/worker/generate", data=body, headers={"content-type": frames.CONTENT_TYPE}
        )
        response = await self._unless_lost(session, posted)
        try:
            await _check(response)
            buffer = bytearray()
            while chunk := await self._unless_lost(session, response.content.readany()):
                buffer += chunk
                for frame in frames.bodies(buffer):
                    yield frames.read_event(frame)
        finally:
            response.close()  # unless it was read to its end, this ends the request

    async def _unless_lost(self, session: aiohttp.ClientSession, work: Awaitable[_T]) -> _T:
        """What comes of waiting for it. Raises TimeoutError as soon as it is lost: to close
        connections wakes no reader.
        """
        async with asyncio.timeout(None if session is self._session else 0) as limit:
            self._waiting.add(limit)
            try:
                return await work
            finally:
                self._waiting.discard(limit)

    async def _listen(self, session: aiohttp.ClientSession) -> str:
        """Hear what it says of itself; returns why there is no more."""
        buffer, now = bytearray(), asyncio.get_running_loop().time
        async with (
            asyncio.timeout(_SILENT) as limit,
            session.get(f"{self.url}/worker/status") as response,
        ):
            if response.status != 200:
                self._refuse(response.status, await _message(response))
                return self.problem
            while chunk := await response.content.readany():
                limit.reschedule(now() + _SILENT)
                buffer += chunk
                for body in frames.bodies(buffer):
                    self._hear(read_status(body))
        return "it has ended"

    def _hear(self, status: ReplicaStatus) -> None:
        self.status, self._unsure, self.tried = status, False, True
        self._on_status(self, status)

    def _refuse(self, status: int, message: str) -> None:
        """Note that it answers, but does not say how it is; it is asked again."""
        if status in (401, 403):
            self.problem = (
                f"{self.url} takes no requests from here: {message}; give --worker-key one of "
                "its API keys"
            )
        elif status == 404:
            self.problem = f"{self.url} is no worker: start it with `headrace serve --worker`"
        else:
            self.problem = f"{self.url} answers with status {status}: {message}"


def _told(error: BaseException) -> str:
    """What is said of a failure; many have no words."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise NoReplicaError where it says that it takes no more now, and RefusedError for other
    errors.
    """
    if response.status == 200:
        return
    message = await _message(response)
    if response.status in (429, 503):
        raise NoReplicaError(message)
    raise RefusedError("request" if response.status < 500 else "internal", message)


async def _message(response: aiohttp.ClientResponse) -> str:
    """What an error says."""
    try:
        return str(msgspec.json.decode(await response.read())["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.reason or "an error without words"
