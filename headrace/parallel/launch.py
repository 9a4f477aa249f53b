"""Starts worker processes, for the ranks other than 0."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class Process(Protocol):
    connection: socket.socket

    def kill(self) -> None: ...

    def end_reason(self, seconds: float) -> str:
        """Wait up to `seconds` for the end; return how it ended, or '' if it runs."""

    def cpu_ticks(self) -> int | None: ...


class Launcher(Protocol):
    host: str
    interface: str
    """Network interface of gloo in this process; empty: gloo's choice."""

    def start(self, rank: int) -> Process:
        """Start or receive the process of a rank. Raises OSError."""

    def close(self) -> None: ...


class LocalProcess:
    def __init__(self, popen: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._popen, self.connection = popen, connection

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def end_reason(self, seconds: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._popen.wait(seconds)
            return f"ended by signal {-code}" if code < 0 else f"ended by exit code {code}"
        return ""

    def cpu_ticks(self) -> int:
        try:
            fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])


class LocalLauncher:
    """Starts workers on this machine. The system ends them with the starting thread."""

    host, interface = LOOPBACK, "lo"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def start(self, rank: int) -> LocalProcess:
        ours, theirs = socket.socketpair()
        environment = {INTERFACE_VARIABLE: self.interface}
        with theirs:
            return LocalProcess(start_process(self._command, theirs, environment), ours)

    def close(self) -> None:
        pass


def start_process(
    command: Sequence[str], connection: socket.socket, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a worker with a connection to rank 0.

    `command` gets the connection's descriptor and the id of this process.
    """
    python_path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        [*command, str(connection.fileno()), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": python_path, **environment},
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so Ctrl-C in the terminal reaches only this process
    )
