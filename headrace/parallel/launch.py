"""The processes of ranks that run beside rank 0, on its machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that says over which interface gloo links ranks."""


class Process(Protocol):
    """A process that follows rank 0, as that one sees it."""

    connection: socket.socket

    def kill(self) -> None:
        """End it, wherever it is."""

    def ended(self, seconds: float) -> str:
        """How it ended, which is waited for so long; empty where it has not."""

    def ticks(self) -> int | None:
        """What it has used of the processor, in ticks of the system's clock; None where that cannot
        be known.
        """


class Launcher(Protocol):
    """Gives the processes of the other ranks, again each time that they are lost."""

    host: str
    """The address of this machine that they reach."""
    interface: str
    """Over which gloo links this process to them; empty: whichever it finds."""

    def start(self, rank: int) -> Process:
        """The process of a rank, which waits for its setup. Raises OSError where there is none."""

    def close(self) -> None:
        """There are no more."""


class LocalProcess:
    """A process of this machine."""

    def __init__(self, popen: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._popen, self.connection = popen, connection

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def ended(self, seconds: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._popen.wait(seconds)
            return f"ended by signal {-code}" if code < 0 else f"ended by exit code {code}"
        return ""

    def ticks(self) -> int:
        try:
            fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])


class LocalLauncher:
    """Starts processes on this machine. The system ends them with the thread that starts them."""

    host, interface = LOOPBACK, "lo"

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: see `start_process`."""
        self._command = command

    def start(self, rank: int) -> LocalProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            return LocalProcess(
                start_process(self._command, theirs, {INTERFACE: self.interface}), ours
            )

    def close(self) -> None:
        pass


def start_process(
    command: Sequence[str], connection: socket.socket, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a process that follows rank 0 over a connection, which it inherits.

    `command` is given the descriptor of the connection and the id of this process. It imports from
    where this process does.
    """
    return subprocess.Popen(
        [*command, str(connection.fileno()), str(os.getpid())],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environment},
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for this process
    )
