import asyncio
import logging
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.server.http_exchange import PING, App, Message, Receive, Scope, Send
from headrace.server.settings import Settings

_MAX_HEAD_BYTES = 1 << 16
_PROBE_SECONDS = 0.5
_FIRST_POLL_SECONDS = 0.001
_POLL_SECONDS = 0.1
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("headrace.server")


class Connection(HttpToolsProtocol):
    """Speaks the parts of HTTP/1 (RFC 9112) that uvicorn's protocol gets wrong.

    It ignores `Upgrade`, sends no chunks in HTTP/1.0, and responds to clients that have
    ended their side. It closes connections whose client sends a request's head or reads a response
    too slowly.
    """

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._send_timer: asyncio.TimerHandle | None = None
        self._half_closed_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        # This can count a little data of a later request. It is little because uvicorn pauses
        # reading while an earlier request is in progress.
        self._unset_keepalive_if_required()
        self._parse(data)
        self._head_bytes += len(data)
        if self._head_timer and self._head_bytes > _MAX_HEAD_BYTES:
            self._cut(f"the head of its request is longer than {_MAX_HEAD_BYTES:,} bytes")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("This server is no proxy.")
                return
            # The parser takes the body for another protocol. A server may ignore the header, so the
            # request is parsed again without it.
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._parse(head + data[upgrade.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._head_timer:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: App) -> None:  # type: ignore[override] # our types of ASGI
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(cycle, app)
        if cycle.scope["method"] != "HEAD":
            # It has the methods of a transport that a cycle calls.
            cycle.transport = _HeadWithBody(cycle, self.loop)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def eof_received(self) -> bool:  # type: ignore[override] # True keeps the connection open
        """Keep the connection if its client has ended its side after a complete request."""
        if self._is_idle or self.cycle.more_body:
            return False
        is_streaming = not self.pipeline and self.cycle.response_started
        if is_streaming and PING not in self.cycle.scope:
            return False
        delay = 0 if is_streaming else _PROBE_SECONDS
        self._half_closed_timer = self.loop.call_later(delay, self._probe)
        return True

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _probe(self) -> None:
        """Send an interim response or an empty event.

        A client that has left altogether then resets the connection.
        """
        scope: Scope = self.cycle.scope  # type: ignore[assignment] # our type of ASGI
        is_first = not self.cycle.response_started and not self.pipeline
        if is_first and scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        elif PING in scope:
            scope[PING]()
        self._look_for_reset(_FIRST_POLL_SECONDS)

    def _look_for_reset(self, seconds: float) -> None:
        # asyncio reads no more from this connection, so it would notice a reset only at a write.
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            later = min(2 * seconds, _POLL_SECONDS)
            self._half_closed_timer = self.loop.call_later(seconds, self._look_for_reset, later)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed_timer and self._is_idle:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_send_timer()
        self._stop_head_timer()
        if self._half_closed_timer:
            self._half_closed_timer.cancel()

    def _start_head_timer(self) -> None:
        self._head_bytes = 0
        seconds = self._settings.receive_timeout
        reason = f"it sent no complete request head within {seconds:g} s"
        self._head_timer = self.loop.call_later(seconds, self._cut, reason)

    def _stop_head_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_send_timer(self) -> None:
        buffer_size = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(
            self._settings.send_timeout, self._check_progress, buffer_size
        )

    def _check_progress(self, previous_size: int) -> None:
        if self.transport.get_write_buffer_size() < previous_size:
            self._start_send_timer()
        else:
            self._cut(f"its client read nothing for {self._settings.send_timeout:g} s")

    def _stop_send_timer(self) -> None:
        if self._send_timer:
            self._send_timer.cancel()
            self._send_timer = None

    def _cut(self, reason: str) -> None:
        log.info("connection closed: %s", reason)
        self.transport.abort()


class _HeadWithBody:
    """Writes the head of a response with the start of its body, in one segment.

    A head waits until the body's first write, or until the event loop has run other work.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head, self._had_head = b"", False

    def write(self, data: bytes) -> None:
        if self._cycle.response_started and not self._had_head:
            self._head, self._had_head = data, True
            self._loop.call_soon(self._flush)
            return
        head, self._head = self._head, b""
        self._transport.write(head + data)

    def _flush(self) -> None:
        if self._head:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()


def _without_chunks(cycle: RequestResponseCycle, app: App) -> App:
    """Let the end of the connection end a body without a length, as HTTP/1.0 has no chunks."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return call
