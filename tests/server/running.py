"""A server in another process, and plain HTTP requests to it."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 150.0
"""Maximum seconds to wait for anything, on a busy machine."""


class Reply(NamedTuple):
    """A complete response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; `[DONE]` stays text."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Running:
    """A running `headrace serve`, or another command that listens."""

    def __init__(
        self,
        model: str,
        *flags: str,
        env: dict[str, str] | None = None,
        program: str = "headrace",
        command: str = "serve",
        waits: bool = True,
    ) -> None:
        """`waits`: for the model; otherwise the server may still load it."""
        words = [sys.executable, "-m", program, command, model, "--port", "0", *flags]
        self.process = subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {})
        )
        self.log: list[str] = []
        self.port = 0
        self.ready = threading.Event()
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        awaited = self.ready if waits else self._listens
        assert awaited.wait(SECONDS) and self.port, "".join(self.log)

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"^address +http://\S+:(\d+)/v1|port (\d+) responds", line):
                self.port = int(found[1] or found[2])
                self._listens.set()
            if line.startswith("try "):
                self.ready.set()
        self.ready.set()
        self._listens.set()

    @property
    def engine_pid(self) -> int:
        return engine_of(self.process.pid)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request; a body other than bytes is sent as JSON."""
        connection = self.connect()
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(
                method,
                path,
                sent,
                ({"content-type": "application/json"} if sent else {}) | (headers or {}),
            )
            response = connection.getresponse()
            return Reply(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.request("GET", path, None, headers)

    def open_stream(self, path: str, body: Any) -> socket.socket:
        """Send a request and leave its response unread."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection

    def figures(self) -> dict[str, float]:
        """Return our metrics that have no labels but those of the server."""
        text = self.get("/metrics").body.decode()
        found = re.findall(
            r'^(headrace_\w+){model_name=".*",version="[^"]*"} (\S+)$', text, re.MULTILINE
        )
        return {name: float(value) for name, value in found}

    def at_rest(self) -> bool:
        """Whether the engine is idle and all blocks are free."""
        figures = self.figures()
        busy = figures["headrace_sequences_running"] + figures["headrace_sequences_waiting"]
        return not busy and figures["headrace_kv_blocks_free"] == figures["headrace_kv_blocks"] > 0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(SECONDS)
        assert self.process.stderr
        self._reader.join(SECONDS)
        # To close a pipe that another thread reads would wait for that thread without end.
        if left := _writers(self.process.stderr.fileno()) if self._reader.is_alive() else {}:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes outlive their server: {left}")
        self.process.stderr.close()
        return code


def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds, and fail if it takes too long."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return False


def in_background(calls: list[Callable[[], Reply]]) -> tuple[list[Reply], list[threading.Thread]]:
    """Run calls in threads; returns the list of their replies and the threads."""
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda call=call: replies.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    return replies, threads


def running(model: str, *flags: str, program: str = "headrace") -> Iterator[Running]:
    """Run a server until the test ends."""
    server = Running(model, *flags, program=program)
    try:
        yield server
    finally:
        code = server.stop()
        assert code == 0, "".join(server.log)


def engine_of(pid: int) -> int:
    """Return the process id of the engine of a server or a batch.

    The other child process renders chat templates.
    """
    (engine,) = [
        child
        for child in _children(pid)
        if b"-m" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]
    return engine


def _writers(pipe: int) -> dict[int, str]:
    """Return the command lines of other processes that hold the pipe."""
    found = {}
    name = os.readlink(f"/proc/self/fd/{pipe}")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            if name in links and int(folder.name) != os.getpid():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
