"""A connection of uvicorn's that does not wait for ever for a client to read."""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("headrace.server")


class Connection(HttpToolsProtocol):
    """It is cut where its client takes nothing for so many seconds, although there is more to send than is kept for it.

    Else a client that does not read would keep its place among the requests after the engine is done with it.
    """

    def __init__(self, *args: Any, send_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._send_timeout = send_timeout
        self._look: asyncio.TimerHandle | None = None

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

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self._send_timeout, self._cut_unless_less, self.transport.get_write_buffer_size())

    def _cut_unless_less(self, than: int) -> None:
        if self.transport.get_write_buffer_size() < than:
            self._look_later()
            return
        log.info("a connection was cut: its client took nothing for %g s", self._send_timeout)
        self.transport.abort()

    def _look_no_more(self) -> None:
        if self._look:
            self._look.cancel()
            self._look = None
