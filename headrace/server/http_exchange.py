"""HTTP over bare ASGI."""

import asyncio
import reprlib
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, TypeVar

import msgspec

from headrace.server.admissions import Admission
from headrace.server.content_encoding import decode, read_encodings
from headrace.server.errors import ApiError, invalid
from headrace.server.field_table import refuse_unserved
from headrace.server.field_types import TokenId
from headrace.server.request_record import RequestRecord
from headrace.server.settings import Settings
from headrace.server.stopwatch import Stopwatch
from headrace.server.surrogates import mend_surrogates

# The types of ASGI 3.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_T = TypeVar("_T")
_MAX_NAMED_KEYS = 5
BASE_SEED = "headrace.seed"
"""ASGI extension: the base seed for the prompts of this request that set none."""
SSE_DONE = b"data: [DONE]\n\n"
_SSE_PING = b": ping\n\n"
PING = "headrace.ping"
"""Key of a function in the scope of an open stream, which sends a comment."""
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would buffer the stream otherwise
}
_encoder = msgspec.json.Encoder()


class Disconnected(Exception):
    """The client closed the connection."""


class HttpExchange:
    """One HTTP request and its response, which one call of a `respond` or `stream` method sends."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings) -> None:
        self.stopwatch = Stopwatch()
        self.scope = scope
        self.path: str = scope["path"]
        """Path of the route."""
        self.deployment = ""
        """Model that an Azure path names."""
        # Reversed, so that the first of several headers with one name counts.
        self._headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        self.response_headers: dict[str, str] = {}
        """Further headers of the response."""
        self.record = RequestRecord.of(scope["method"], scope["path"], self._headers)
        self.api_key: str | None = None
        self.base_seed: int | None = (scope.get("extensions") or {}).get(BASE_SEED)
        self.admission: Admission | None = None
        """Set while the request counts as in progress."""
        self.response_started = False
        self._receive = receive
        self._send = send
        self._settings = settings
        self._last_sent = monotonic()

    def header(self, name: str) -> str | None:
        return self._headers.get(name)

    async def read(self, record_type: type[_T]) -> _T:
        """Read the JSON body as a record. Raises ApiError."""
        # A body without a content type counts as JSON, unless a web page sent it: a browser lets
        # other sites send such a body, but asks this server first before it sends JSON.
        default_type = "" if self.header("origin") else "application/json"
        body = await self.read_body("application/json", default_type)
        return self._read_record(body.removeprefix(BOM_UTF8), record_type)

    def _read_record(self, body: bytes, record_type: type[_T]) -> _T:
        try:
            record = _decode(body, record_type)
        except msgspec.ValidationError as error:
            raise _field_error(error, body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            mended = mend_surrogates(body)
            if mended is None:
                raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
            return self._read_record(mended, record_type)
        refuse_unserved(body, record_type)
        if self.deployment and isinstance(record, msgspec.Struct):
            record = msgspec.structs.replace(record, model=self.deployment)
        return record

    async def read_body(self, content_type: str, default_type: str = "") -> bytes:
        """Read a body of this content type. Raises ApiError."""
        given_type = (self.header("content-type") or default_type).partition(";")[0]
        if given_type.strip().lower() != content_type:
            raise ApiError(
                415, "unsupported_media_type", f"content-type of the body must be {content_type}"
            )
        encodings = read_encodings(self.header("content-encoding") or "")
        length = self.header("content-length") or ""
        if length.isdecimal():
            self._check_size(int(length))  # before `100 Continue` asks for the body

        timeout = self._settings.receive_timeout
        try:
            async with asyncio.timeout(timeout):
                body = await self._receive_body()
        except TimeoutError:
            error = ApiError(
                408, "request_timeout", f"the body did not arrive within {timeout:g} s"
            )
            error.headers["connection"] = "close"
            raise error from None
        self.stopwatch.body_received()
        return decode(body, encodings, self._settings.max_body_bytes)

    async def _receive_body(self) -> bytes:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            size += len(part)
            self._check_size(size)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _check_size(self, size: int) -> None:
        max_size = self._settings.max_body_bytes
        if size > max_size:
            raise ApiError(413, "request_too_large", f"the body is longer than {max_size:,} bytes")

    async def while_connected(self, work: Awaitable[_T]) -> _T:
        """Await `work`; a disconnect cancels it. Raises Disconnected."""
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Disconnected
            return task.result()
        finally:
            disconnect.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.respond_bytes(_encoder.encode(value), "application/json", status, headers)

    async def respond_bytes(
        self,
        body: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        own_headers = {"content-type": content_type, "content-length": str(len(body))}
        await self._start_response(status, own_headers | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": body})

    async def respond_empty(self, status: int, headers: Mapping[str, str]) -> None:
        await self._start_response(status, headers)
        await self._send({"type": "http.response.body", "body": b""})

    async def stream_events(self, events: AsyncGenerator[bytes], keepalive_seconds: float) -> None:
        """Stream server-sent events, with comments after silence. Raises Disconnected."""
        pings = [asyncio.ensure_future(self._ping_after_silence(keepalive_seconds))]
        self.scope[PING] = lambda: pings.append(asyncio.ensure_future(self._ping()))
        try:
            await self.stream_bytes(events, _SSE_HEADERS)
        finally:
            del self.scope[PING]
            for ping in pings:
                ping.cancel()

    async def stream_bytes(self, parts: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        await self._start_response(200, headers)
        if self.scope["method"] == "HEAD":
            await parts.aclose()
        else:
            await self.while_connected(self._send_parts(parts))
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_parts(self, parts: AsyncGenerator[bytes]) -> None:
        async with aclosing(parts):
            async for part in parts:
                self._last_sent = monotonic()
                await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _ping(self) -> None:
        await self._send({"type": "http.response.body", "body": _SSE_PING, "more_body": True})

    async def _ping_after_silence(self, keepalive_seconds: float) -> None:
        while True:
            await asyncio.sleep(keepalive_seconds)
            if monotonic() - self._last_sent >= keepalive_seconds:
                await self._ping()

    async def _start_response(self, status: int, headers: Mapping[str, str]) -> None:
        self.response_started = True
        self.record.status = status
        all_headers = {**headers, **self.response_headers}
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()
        ]
        pairs.append((b"x-request-id", self.record.id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


Handler = Callable[[HttpExchange], Awaitable[None]]


def _decode(body: bytes, record_type: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=record_type)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        # JSON has one kind of number, so 5.0 is an integer.
        return msgspec.convert(_with_integers(msgspec.json.decode(body)), record_type)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


def _field_error(error: msgspec.ValidationError, body: bytes) -> ApiError:
    message, _, place = str(error).partition(" - at ")
    # The place is `$.field`; the place of a wrong key is "`key` in `$.field`".
    path = place.rpartition("`$")[2].rstrip("`")
    param = path.lstrip(".").partition(".")[0].partition("[")[0] or None
    if not path and "missing required field" in message:
        param = message.rpartition("field `")[2].rstrip("`")
    if place.startswith("`key` in") and param:
        message += _wrong_keys(msgspec.json.decode(body)[param])
    return invalid(f"{path.lstrip('.') or 'the body'}: {message}", param, "invalid_value")


def _wrong_keys(value: dict[str, object]) -> str:
    """Return words that name the first keys that are no token ids."""
    wrong = []
    for key in value:
        try:
            msgspec.convert(key, TokenId, strict=False)
        except msgspec.ValidationError:
            wrong.append(key)
    named = ", ".join(reprlib.repr(key) for key in wrong[:_MAX_NAMED_KEYS])
    more = ", ..." if len(wrong) > _MAX_NAMED_KEYS else ""
    return f", in the keys {named}{more}"


def sse_event(value: object) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_sse_event(name: str, fields: Mapping[str, object]) -> bytes:
    data = _encoder.encode({"type": name, **fields})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
