"""Requests and responses over bare ASGI: bodies of bounded size, JSON, streams of events, and
clients that leave.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, TypeVar

import msgspec

from headrace.server.errors import ApiError, invalid
from headrace.server.request_record import RequestRecord
from headrace.server.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
"""The four names of ASGI 3."""

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
"""The event that ends streams of OpenAI's API."""
_PING = b": ping\n\n"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # of nginx, which would collect the stream
}
_encoder = msgspec.json.Encoder()


class Disconnected(Exception):
    """The client has left."""


class Call:
    """One request, and the way back to its client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings) -> None:
        self.scope = scope
        names = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }  # the first counts
        self._headers = names
        self.record = RequestRecord.of(scope["method"], scope["path"], names)
        self.key: str | None = None
        self.responding = False
        """Whether the status has been sent."""
        self._receive = receive
        self._send = send
        self._settings = settings
        self._last_sent = monotonic()

    def header(self, name: str) -> str | None:
        """A header of the request, by its name in lower case."""
        return self._headers.get(name)

    async def read(self, kind: type[_T]) -> _T:
        """The body as a record. Raises ApiError for one that is too large, or not JSON, or not this
        record.
        """
        # Where no type is given JSON is meant; but another site's page may send a body without one,
        # while for JSON its browser asks first.
        assumed = "" if self.header("origin") else "application/json"
        body = await self.read_body("application/json", assumed)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at ")
            path = place.rpartition("`$")[2].rstrip(
                "`"
            )  # of a key that is wrong: `key` in `$.field`
            param = path.lstrip(".").partition(".")[0].partition("[")[0] or None
            if not path and "missing required field" in message:
                param = message.rpartition("field `")[2].rstrip("`")
            raise invalid(
                f"{path.lstrip('.') or 'the body'}: {message}", param, "invalid_value"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None

    async def read_body(self, content_type: str, assumed: str = "") -> bytes:
        """The body, which must say that it is of this type; `assumed` is the type of one that says
        nothing. Raises ApiError.
        """
        if (self.header("content-type") or assumed).partition(";")[
            0
        ].strip().lower() != content_type:
            raise ApiError(415, "unsupported_media_type", f"the body must be {content_type}")
        if self.header("content-encoding") not in (None, "identity"):
            raise ApiError(415, "unsupported_media_type", "the body must not be compressed")
        try:
            async with asyncio.timeout(self._settings.receive_timeout):
                return await self._body()
        except TimeoutError:
            late = ApiError(
                408,
                "request_timeout",
                f"the body did not come within {self._settings.receive_timeout:g} s",
            )
            late.headers["connection"] = "close"
            raise late from None

    async def _body(self) -> bytes:
        parts, size, most = [], 0, self._settings.max_body_bytes
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise ApiError(413, "request_too_large", f"the body has more than {most:,} bytes")
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def while_connected(self, work: Awaitable[_T]) -> _T:
        """The result of some work, which is cancelled when the client leaves. Raises Disconnected
        then.
        """
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Disconnected
            return task.result()
        finally:
            left.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with JSON."""
        await self.respond_bytes(_encoder.encode(value), "application/json", status, headers)

    async def respond_bytes(
        self,
        body: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with a body."""
        await self._begin(
            status,
            {"content-type": content_type, "content-length": str(len(body))} | dict(headers or {}),
        )
        await self._send({"type": "http.response.body", "body": body})

    async def respond_unchanged(self, headers: Mapping[str, str]) -> None:
        """Answer that what the client has is still the newest."""
        await self._begin(304, headers)
        await self._send({"type": "http.response.body", "body": b""})

    async def stream(self, events: AsyncGenerator[bytes], keepalive: float) -> None:
        """Answer with events as they come, and a comment where none came for so many seconds.
        Raises Disconnected.
        """
        pinging = asyncio.ensure_future(self._ping(keepalive))
        try:
            await self.stream_bytes(events, _STREAM_HEADERS)
        finally:
            pinging.cancel()

    async def stream_bytes(self, parts: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        """Answer with the parts of a body as they come. Raises Disconnected."""
        await self._begin(200, headers)
        await self.while_connected(self._pass_on(parts))
        await self._send({"type": "http.response.body", "body": b""})

    async def _pass_on(self, events: AsyncGenerator[bytes]) -> None:
        async with aclosing(events):
            async for event in events:
                self._last_sent = monotonic()
                await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _ping(self, keepalive: float) -> None:
        while True:
            await asyncio.sleep(keepalive)
            if monotonic() - self._last_sent >= keepalive:
                await self._send({"type": "http.response.body", "body": _PING, "more_body": True})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.responding = True
        self.record.status = status
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        pairs.append((b"x-request-id", self.record.id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


Handler = Callable[[Call], Awaitable[None]]


def named_event(name: str, value: Mapping[str, object]) -> bytes:
    """An event with a name, which stands in it as its type as well."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encoder.encode({"type": name, **value}))


def event(value: object) -> bytes:
    """A value as an event of a stream."""
    return b"data: " + _encoder.encode(value) + b"\n\n"
