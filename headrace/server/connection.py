import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.settings import Settings

_MAX_HEAD_BYTES = 1 << 16

log = logging.getLogger("headrace.server")


class Connection(HttpToolsProtocol):
    """Closes connections whose client sends a request's head or reads a response too slowly."""

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        # This can count a little data of a later request. It is little because uvicorn pauses
        # reading while an earlier request is in progress.
        super().data_received(data)
        self._head_bytes += len(data)
        if self._head_timer and self._head_bytes > _MAX_HEAD_BYTES:
            self._cut(f"the head of its request is longer than {_MAX_HEAD_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._head_timer:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

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
