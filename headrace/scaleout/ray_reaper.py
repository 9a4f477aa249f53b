"""Ends what a Ray cluster of our own has left once the process that started it is gone, however it
ended.

It waits for the end of its standard input, which that process holds open. Processes of the cluster
are known by the files that they have open: each writes a log in its folder, whatever it calls
itself.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROUNDS = 100
"""Looks for processes, of which a last one may have just been started."""


def processes_of(folder: str) -> Iterator[int]:
    """Those that have a file in this folder open."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file).startswith(folder + os.sep):
                yield int(file.parts[2])


def reap(folder: str, starter: int) -> None:
    """End all processes of a cluster but the one that started it, and remove its folder."""
    for _ in range(_ROUNDS):
        left = set(processes_of(folder)) - {starter}
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    reap(sys.argv[1], int(sys.argv[2]))
