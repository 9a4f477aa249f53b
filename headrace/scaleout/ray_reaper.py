"""Cleans up a private Ray cluster after the process that started it has ended.

It waits for the end of its standard input, which that process holds open. A process of the cluster
is recognised by its open files: each has a log file in the cluster's folder.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAX_ROUNDS = 100
"""Maximum searches for processes; each may find some that have just started."""


def processes_of(folder: str) -> Iterator[int]:
    """Yield the ids of processes with an open file in the folder."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file).startswith(folder + os.sep):
                yield int(file.parts[2])


def reap(folder: str, starter: int) -> None:
    """Kill the processes of a cluster except its starter, and remove its folder."""
    for _ in range(_MAX_ROUNDS):
        pids = set(processes_of(folder)) - {starter}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    reap(sys.argv[1], int(sys.argv[2]))
