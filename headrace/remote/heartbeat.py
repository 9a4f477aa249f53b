"""The engine's pulse: a page of memory that the engine process writes and the API process reads, so
that no queue stands between.

A process that is stopped writes nothing, whatever it was doing. One whose step hangs goes on
writing, and says for how long the step has run.
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
    """What was read, in seconds."""

    age: float
    """Since the process last wrote."""
    step: float
    """For how long a step has run then; 0 between steps."""


def cpu_ticks(pid: int) -> int | None:
    """What a process has used of the processor, in ticks of the system's clock; None where that
    cannot be known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


class Heartbeat:
    """The page, by its file descriptor. Times are those of the system's monotonic clock, which
    processes share.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, _SIZE)

    @classmethod
    def create(cls) -> "Heartbeat":
        """A new page, which has just been written."""
        fd = os.memfd_create("headrace-heartbeat")
        os.ftruncate(fd, _SIZE)
        heartbeat = cls(fd)
        heartbeat.beat(None)
        return heartbeat

    def beat(self, step_begun: float | None) -> None:
        """Write that the process is alive, and when its step began, if it is in one."""
        now = time.monotonic()
        self._page[: _LAYOUT.size] = _LAYOUT.pack(now, now if step_begun is None else step_begun)

    def read(self) -> Pulse:
        """The pulse now."""
        written, step_begun = _LAYOUT.unpack(self._page[: _LAYOUT.size])
        return Pulse(time.monotonic() - written, written - step_begun)

    def close(self) -> None:
        """Let go of the page."""
        self._page.close()
        os.close(self.fd)
