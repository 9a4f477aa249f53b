"""HTTP requests of an audit.

Each request is bounded in seconds and bytes, and all requests together are bounded in number and
tokens. The client follows no redirect, so it reaches the named server only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from headrace.audit.bodies import Body
from headrace.errors import AuditError

MAX_BYTES = 4 << 20
"""Bytes of one response."""
_MAX_ERROR_BYTES = 64 << 10
_MAX_MESSAGE = 200
_CONNECT_SECONDS = 10.0
_BUSY_SECONDS = (0.25, 0.5, 1.0, 2.0)
"""Seconds before each further try after status 429 or 503."""
_NOT_OFFERED = (400, 404, 405, 406, 415, 422, 501)

_T = TypeVar("_T")


class NotOfferedError(Exception):
    """The server refuses the request: it lacks a route or a field."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


class FailedError(Exception):
    """The server did not answer, or not in the form of OpenAI's API."""


class _BusyError(FailedError):
    """The server has too many requests."""


@dataclass(frozen=True, kw_only=True)
class AuditLimits:
    """Bounds of an audit."""

    requests: int
    """Requests of the audit."""
    tokens: int
    """Output tokens of the audit."""
    seconds: float
    """Seconds of the audit."""
    request_seconds: float
    """Seconds of one request."""


@dataclass(frozen=True)
class Stream:
    """The events of a stream, and whether it ended with `[DONE]`."""

    events: list[Body]
    is_done: bool


class Client:
    """Sends requests to one server. Use it in an `async with` block."""

    def __init__(self, url: str, key: str, limits: AuditLimits) -> None:
        """`url` has neither path nor final slash; `key` may be empty."""
        self._url = url
        self._limits = limits
        self._headers = {"accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self.num_requests = 0
        self.num_tokens = 0

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            # A server may close a kept connection at any time, just before the next request.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session:
            await self._session.close()

    async def get(self, path: str, shape: type[_T]) -> _T:
        """Get a JSON body. Raises NotOfferedError and FailedError."""

        async def once() -> _T:
            return _decode(await self._exchange("GET", path, None), shape)

        return await self._while_busy({}, once)

    async def post(self, path: str, body: Mapping[str, Any], shape: type[_T]) -> _T:
        """Post a JSON body, and read the one that comes back.

        Raises NotOfferedError and FailedError.
        """

        async def once() -> _T:
            return _decode(await self._exchange("POST", path, body), shape)

        return await self._while_busy(body, once)

    async def stream(
        self, path: str, body: Mapping[str, Any], max_events: int | None = None
    ) -> Stream:
        """Read a stream of events, and close the connection after `max_events` of them.

        Raises NotOfferedError and FailedError.
        """

        async def once() -> Stream:
            return await self._read_stream(path, body, max_events)

        return await self._while_busy(body, once)

    async def _while_busy(self, body: Mapping[str, Any], once: Callable[[], Awaitable[_T]]) -> _T:
        """Try until the server is not busy. A try is bounded in seconds."""
        self._count(_max_tokens(body))
        for pause in (*_BUSY_SECONDS, None):
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    return await once()
            except _BusyError:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            except TimeoutError:
                seconds = self._limits.request_seconds
                raise FailedError(f"no end of the response in {seconds:g} seconds") from None
        raise AssertionError("the last try returns or raises")

    def _count(self, tokens: int) -> None:
        """Raises AuditError if the audit would exceed its limits."""
        self.num_requests += 1
        self.num_tokens += tokens
        limits = self._limits
        if self.num_requests > limits.requests or self.num_tokens > limits.tokens:
            raise AuditError(
                f"the audit reached its limit of {limits.requests:,} requests and "
                f"{limits.tokens:,} tokens; please report it"
            )

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            async with self._request(method, path, body) as response:
                await _check(response)
                return await _read(response, MAX_BYTES)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise FailedError(_reason(error)) from None

    async def _read_stream(
        self, path: str, body: Mapping[str, Any], max_events: int | None
    ) -> Stream:
        events: list[Body] = []
        buffer, num_bytes = bytearray(), 0
        try:
            async with self._request("POST", path, body) as response:
                await _check(response)
                async for chunk in response.content.iter_any():
                    num_bytes += len(chunk)
                    if num_bytes > MAX_BYTES:
                        raise FailedError(f"the stream is longer than {MAX_BYTES >> 20} MB")
                    buffer += chunk
                    *lines, rest = bytes(buffer).split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        data = line.strip().removeprefix(b"data:").strip()
                        if not line.startswith(b"data:") or not data:
                            continue
                        if data == b"[DONE]":
                            return Stream(events, is_done=True)
                        events.append(_event(data))
                        if max_events is not None and len(events) >= max_events:
                            response.close()
                            return Stream(events, is_done=False)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise FailedError(f"{_reason(error)}, after {len(events)} events") from None
        return Stream(events, is_done=False)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> "aiohttp.client._RequestContextManager":
        assert self._session, "the client is open"
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        return self._session.request(
            method, f"{self._url}{path}", data=data, headers=headers, allow_redirects=False
        )


def _max_tokens(body: Mapping[str, Any]) -> int:
    return int(body.get("max_tokens", 0)) * int(body.get("n", 1))


def _decode(data: bytes, shape: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FailedError(f"the response is no JSON of OpenAI's API: {error}") from None


def _event(data: bytes) -> Body:
    event = _decode(data, Body)
    if event.error is not None:
        raise FailedError(f"the stream ends with an error: {_message(data)}")
    return event


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise the error of a response without success."""
    status = response.status
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise FailedError(f"the response is compressed ({encoding[:20]}), unasked")
    if status == 200:
        return
    if 300 <= status < 400:
        raise FailedError(f"status {status} leads elsewhere, and an audit follows no redirect")
    message = _message(await _read(response, _MAX_ERROR_BYTES))
    if status in (401, 403):
        raise AuditError(
            f"the server refuses the API key with status {status}: {message}; give another with "
            "--api-key or HEADRACE_API_KEY"
        )
    if status in (429, 503):
        raise _BusyError(f"status {status}: {message}")
    if status in _NOT_OFFERED:
        raise NotOfferedError(status, message)
    raise FailedError(f"status {status}: {message}")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise FailedError(f"the response is longer than {max_bytes >> 10} kB")
    return bytes(data)


def _message(data: bytes) -> str:
    """The message of an error body, in the shapes of OpenAI, FastAPI and others."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return data.decode(errors="replace").strip()[:_MAX_MESSAGE] or "no message"
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    return str(body)[:_MAX_MESSAGE]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_MESSAGE]
