"""Starts an engine process, whose modules load before its model is chosen."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headrace.remote.heartbeat import Heartbeat

COMMAND = (sys.executable, "-P", "-m", "headrace.remote.process")
"""Arguments follow: descriptors of the socket and the heartbeat, and the id of the parent."""


class StartedEngine(NamedTuple):
    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    heartbeat: Heartbeat


def start_engine() -> StartedEngine:
    ours, theirs = socket.socketpair()
    heartbeat = Heartbeat.create()
    # The process imports from the paths of this one, and never from the working directory, which
    # may be a checkout of another version.
    python_path = os.pathsep.join(map(os.path.abspath, sys.path))
    process = subprocess.Popen(
        [*COMMAND, str(theirs.fileno()), str(heartbeat.fd), str(os.getpid())],
        env=os.environ | {"PYTHONPATH": python_path},
        pass_fds=(theirs.fileno(), heartbeat.fd),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so Ctrl-C in the terminal reaches only this process
    )
    theirs.close()
    return StartedEngine(process, ours, heartbeat)


@contextmanager
def starting_engine() -> Iterator[StartedEngine]:
    """Start an engine process, and end it with the context, whether or not a client took it."""
    started = start_engine()
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        started.connection.close()
        started.heartbeat.close()
