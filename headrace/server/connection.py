"""A connection of uvicorn's that does not wait for ever for a client: to send the head of a
request, or to read what is sent to it.
"""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.settings import Settings

_MOST_HEAD = 1 << 16
"""Bytes that the head of a request may have before it is whole."""

log = logging.getLogger("headrace.server")


class Connection(HttpToolsProtocol):
    """It is cut where its client sends no whole head for so many seconds or bytes, or takes nothing
    for so many seconds although there is more to send than is kept for it.

    Else a client that does neither would keep its place for ever, among the connections or among
    the requests. The body of a request has its time in `asgi.Call`.
    """

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._late: asyncio.TimerHandle | None = None
        """When the client must have sent the head of a request; None where it need not."""
        self._head_bytes = 0
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Read on; what comes here behind the last head is not much, since reading pauses while a
        request waits for the one before it.
        """
        super().data_received(data)
        self._head_bytes += len(data)
        if self._late and self._head_bytes > _MOST_HEAD:
            self._cut("the head of its request is too large")

    def on_message_begin(self) -> None:
        """A request begins: the first bytes of its head are there."""
        super().on_message_begin()
        if not self._late:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._expect_head_no_more()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """There is more to send than is kept: look later whether it has become less."""
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        """It has been taken."""
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._look_no_more()
        self._expect_head_no_more()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        seconds = self._settings.receive_timeout
        self._late = self.loop.call_later(
            seconds, self._cut, f"no whole head of a request came from it in {seconds:g} s"
        )

    def _expect_head_no_more(self) -> None:
        if self._late:
            self._late.cancel()
            self._late = None

    def _look_later(self) -> None:
        self._look = self.loop.call_later(
            self._settings.send_timeout,
            self._cut_unless_less,
            self.transport.get_write_buffer_size(),
        )

    def _cut_unless_less(self, than: int) -> None:
        if self.transport.get_write_buffer_size() < than:
            self._look_later()
        else:
            self._cut(f"its client took nothing for {self._settings.send_timeout:g} s")

    def _look_no_more(self) -> None:
        if self._look:
            self._look.cancel()
            self._look = None

    def _cut(self, why: str) -> None:
        log.info("a connection was cut: %s", why)
        self.transport.abort()
