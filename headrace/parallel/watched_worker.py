"""A worker process as rank 0 sees it: its replies, and whether it makes progress."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.parallel.launch import Process
from headrace.parallel.worker import LENGTH

SILENT_SECONDS = 3.0
"""Seconds without reply and CPU time of a stopped worker."""
_CHUNK_BYTES = 1 << 16


@dataclass
class WatchedWorker:
    rank: int
    process: Process
    is_ready: bool = False
    answer: bytes | None = None
    """Answer to the last question."""
    _last_active: float = field(default_factory=time.monotonic)
    _has_replied: bool = False
    _ticks: int | None = None
    _buffer: bytearray = field(default_factory=bytearray)

    def replies(self) -> Iterator[bytes]:
        """Read replies that have arrived, without heartbeats. Raises EOFError."""
        try:
            chunk = self.process.connection.recv(_CHUNK_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._last_active, self._has_replied = time.monotonic(), True
        self._buffer += chunk
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            reply = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            if reply:
                yield reply

    def is_stopped(self) -> bool:
        if not self._has_replied and self.process.cpu_ticks() is None:
            return False
        if time.monotonic() - self._last_active > SILENT_SECONDS:
            ticks = self.process.cpu_ticks()
            if ticks != self._ticks:
                self._last_active, self._ticks = time.monotonic() - SILENT_SECONDS / 2, ticks
        return time.monotonic() - self._last_active > SILENT_SECONDS
