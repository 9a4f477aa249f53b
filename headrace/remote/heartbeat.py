"""Heartbeat of an engine process, in shared memory.

A process whose step hangs still writes it, with the start time of the step.
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("<dd")
_SIZE = mmap.PAGESIZE


class Pulse(NamedTuple):
    age: float
    step: float


def cpu_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


class Heartbeat:
    """The shared page. Times are of the system's monotonic clock."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, _SIZE)

    @classmethod
    def create(cls) -> "Heartbeat":
        fd = os.memfd_create("headrace-heartbeat")
        os.ftruncate(fd, _SIZE)
        heartbeat = cls(fd)
        heartbeat.beat(None)
        return heartbeat

    def beat(self, step_started: float | None) -> None:
        now = time.monotonic()
        start = now if step_started is None else step_started
        self._page[: _LAYOUT.size] = _LAYOUT.pack(now, start)

    def read(self) -> Pulse:
        written, step_started = _LAYOUT.unpack(self._page[: _LAYOUT.size])
        return Pulse(age=time.monotonic() - written, step=written - step_started)

    def close(self) -> None:
        if not self._page.closed:
            self._page.close()
            os.close(self.fd)
