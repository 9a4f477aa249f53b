"""The engine process: reads commands from its socket, runs the engine in a thread of its own, and
writes what comes of it.

`headrace.remote.start` starts it, with a socket and a page for its pulse, which it inherits.
It ends when its parent closes the socket, or ends; signals of a terminal are for the parent.

The main thread reads frames and checks what they ask for, so a step never waits for that. The
thread of the engine (`engine/thread.py`) puts what is new in a queue, and a third thread encodes
and writes it (`outbox.py`): a reader that is slow holds up no step.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Event as Flag
from threading import Thread

from headrace.errors import ClosedError, HeadraceError
from headrace.remote import frames
from headrace.remote.heartbeat import Heartbeat
from headrace.remote.host import EngineHost, open_engine
from headrace.remote.outbox import Outbox

_BEAT = 0.1
"""Seconds between two looks at the step."""
_REPORT = 0.25
"""Seconds between two reports, while something happens."""
_CHUNK = 1 << 18
_PR_SET_PDEATHSIG = 1


class EngineServer:
    """Serves one engine to the socket of the API process."""

    def __init__(
        self,
        host: EngineHost,
        outbox: Outbox,
        connection: socket.socket,
        incoming: Iterable[bytes],
        heartbeat: Heartbeat,
    ) -> None:
        """`outbox`: where the host puts its events."""
        self._host = host
        self._outbox = outbox
        self._connection = connection
        self._incoming = incoming
        self._heartbeat = heartbeat
        self._stirred, self._over = Flag(), Flag()
        self._stirred.set()

    def serve(self) -> None:
        """Serve until the API process closes the socket."""
        threads = [
            Thread(target=work, daemon=True) for work in (self._write, self._beat, self._report)
        ]
        for thread in threads:
            thread.start()
        try:
            for body in self._incoming:
                self._host.obey(frames.read_command(body))
        finally:
            self._over.set()
            self._outbox.close()
            self._stirred.set()
            self._host.close()

    def _write(self) -> None:
        """Write what the outbox has, as it comes."""
        with suppress(OSError):  # the API process has gone: the reader sees it, too
            while self._outbox.write_next(self._connection):
                self._stirred.set()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            # by an error of its own: without an engine this process ends, and another is started
            if self._host.thread.closed:
                self._connection.shutdown(socket.SHUT_RD)
                return
            self._heartbeat.beat(self._host.thread.step_begun)

    def _report(self) -> None:
        """Say what the engine does, while that changes."""
        report = None
        with suppress(ClosedError):
            while not self._over.wait(_REPORT):
                self._stirred.wait()
                self._stirred.clear()
                last, report = report, self._host.report()
                if report != last:
                    self._outbox.put(
                        report
                    )  # which stirs: there is another look until nothing changes


def _bodies(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of the frames that come, up to the end of the connection."""
    buffer = bytearray()
    while True:
        try:
            chunk = connection.recv(_CHUNK)
        except ConnectionResetError:
            return
        if not chunk:
            return
        buffer += chunk
        yield from frames.bodies(buffer)


def main(*arguments: str) -> None:
    """Make the engine that the first frame asks for, and serve it. An error of the model or of its
    options is the only frame then, and the exit code is its own.

    `arguments`: the descriptors of the socket and of the heartbeat, and the id of the API process.
    """
    socket_fd, heartbeat_fd, parent = map(int, arguments)
    faulthandler.enable()
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # the API process asks for the stacks of an engine that hangs
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone meanwhile
        return
    connection, heartbeat = socket.socket(fileno=socket_fd), Heartbeat(heartbeat_fd)
    incoming = _bodies(connection)
    setup = next(map(frames.read_setup, incoming), None)
    if setup is None:  # the API process has given it up
        return
    try:
        engine, spec = open_engine(setup)
    except HeadraceError as error:
        with suppress(OSError):  # the API process has met the same error
            connection.sendall(frames.encode(frames.Refused("", "request", str(error))))
        sys.exit(error.exit_code)
    gc.freeze()
    if engine.config.traits.on_gpu:
        # what torch and Triton hold at exit would count as leaks of the native module
        atexit.register(gc.unfreeze)
    outbox = Outbox()
    host = EngineHost(engine, spec, outbox.put)
    with suppress(BrokenPipeError):  # the API process has gone
        connection.sendall(frames.encode(host.info))
        EngineServer(host, outbox, connection, incoming, heartbeat).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
