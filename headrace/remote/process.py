"""The engine process: serves commands from a socket, and ends with its parent.

Separate threads check commands, run steps and write events: no step waits.
"""

import atexit
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event as Flag
from threading import Thread

from headrace.errors import ClosedError, DeviceLostError, HeadraceError
from headrace.remote import frames
from headrace.remote.heartbeat import Heartbeat
from headrace.remote.host import EngineHost, open_engine
from headrace.remote.outbox import Outbox

_BEAT_SECONDS = 0.1
_REPORT_SECONDS = 0.25
_CHUNK_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


class EngineServer:
    def __init__(
        self,
        host: EngineHost,
        outbox: Outbox,
        connection: socket.socket,
        incoming: Iterable[bytes],
        heartbeat: Heartbeat,
    ) -> None:
        self._host = host
        self._outbox = outbox
        self._connection = connection
        self._incoming = incoming
        self._heartbeat = heartbeat
        self._closed = Flag()
        self._has_written = Flag()
        self._has_written.set()

    def serve(self) -> None:
        for work in (self._write_events, self._write_heartbeat, self._put_reports):
            Thread(target=work, daemon=True).start()
        try:
            for body in self._incoming:
                self._host.handle(frames.read_command(body))
        finally:
            self._closed.set()
            self._outbox.close()
            self._has_written.set()
            self._host.close()

    def _write_events(self) -> None:
        with suppress(OSError):  # the client has ended; `serve` sees that as well
            while self._outbox.write_next(self._connection):
                self._has_written.set()

    def _write_heartbeat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            # The engine has closed itself after an error: end this process, so the client
            # starts another.
            if self._host.thread.closed:
                self._connection.shutdown(socket.SHUT_RD)
                return
            self._heartbeat.beat(self._host.thread.step_started)

    def _put_reports(self) -> None:
        report = None
        with suppress(ClosedError, DeviceLostError):
            while not self._closed.wait(_REPORT_SECONDS):
                self._has_written.wait()
                self._has_written.clear()
                last, report = report, self._host.report()
                if report != last:
                    self._outbox.put(report)


def _read_bodies(connection: socket.socket) -> Iterator[bytes]:
    buffer = bytearray()
    while True:
        try:
            chunk = connection.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            return
        if not chunk:
            return
        buffer += chunk
        yield from frames.bodies(buffer)


class _LogHandler(logging.Handler):
    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the client has ended
            self._connection.sendall(frames.encode(frames.Log(record.levelno, record.getMessage())))


@contextmanager
def _loader_log(connection: socket.socket) -> Iterator[None]:
    """Send the loader's log to the client."""
    log, handler = logging.getLogger("headrace.loader"), _LogHandler(connection)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


def main(*arguments: str) -> None:
    """Serve until the parent ends; its error is the only event of a failed load."""
    socket_fd, heartbeat_fd, parent = map(int, arguments)
    faulthandler.enable()
    # The client sends SIGUSR1 to an engine that hangs, to see its stacks.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        return

    connection, heartbeat = socket.socket(fileno=socket_fd), Heartbeat(heartbeat_fd)
    incoming = _read_bodies(connection)
    setup = next(map(frames.read_setup, incoming), None)
    if setup is None:  # the client has closed the connection
        return
    try:
        with _loader_log(connection):
            opened = open_engine(setup)
    except HeadraceError as error:
        # A client that has met the same error may have closed the connection.
        with suppress(OSError):
            connection.sendall(frames.encode(frames.Refused("", "request", str(error))))
        sys.exit(error.exit_code)

    gc.freeze()
    # Frozen objects would count as leaks of the native module at exit.
    atexit.register(gc.unfreeze)
    outbox = Outbox()
    host = EngineHost(opened, outbox.put)
    with suppress(BrokenPipeError), closing(host):  # a client that has ended breaks the pipe
        # The client watches the heartbeat from here on; the last one is older than the load.
        heartbeat.beat(None)
        connection.sendall(frames.encode(host.info))
        EngineServer(host, outbox, connection, incoming, heartbeat).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
