"""Starts an engine process, which imports its modules while the one that starts it imports its own;
what it is to load is sent later.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headrace.remote.heartbeat import Heartbeat

ENGINE = (sys.executable, "-P", "-m", "headrace.remote.process")
"""The command, before the descriptors of its socket and of its heartbeat and the id of this
process.
"""


class StartedEngine(NamedTuple):
    """An engine process that waits for `frames.Setup`."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    heartbeat: Heartbeat


def start_engine() -> StartedEngine:
    """Start a process, which ends with this one or when its connection is closed.

    It imports from where this one does, and never from the working directory, which may well be a
    checkout of another version.
    """
    ours, theirs = socket.socketpair()
    heartbeat = Heartbeat.create()
    process = subprocess.Popen(
        [*ENGINE, str(theirs.fileno()), str(heartbeat.fd), str(os.getpid())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        pass_fds=(theirs.fileno(), heartbeat.fd),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for this process
    )
    theirs.close()
    return StartedEngine(process, ours, heartbeat)


@contextmanager
def starting_engine() -> Iterator[StartedEngine]:
    """An engine process for a server that is about to be; it does not outlive the context, whatever
    becomes of the server.
    """
    started = start_engine()
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
