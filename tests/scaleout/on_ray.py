"""`headrace serve --replicas`, and its descendant processes."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server.running import SECONDS, Running

REPLICA = "ray::ServeReplica:headrace:replica"


class OnRay(Running):
    """A server whose replicas are actors."""

    def below(self) -> dict[int, str]:
        """Command lines of its descendant processes, by id."""
        return descendants(self.process.pid)

    def replicas(self) -> list[int]:
        """Ids of its replicas."""
        return [pid for pid, command in self.below().items() if command.startswith(REPLICA)]


@contextlib.contextmanager
def serving(model: str, *flags: str, number: int = signal.SIGTERM) -> Iterator[OnRay]:
    """Start a server; end it by a signal, and check that all its processes end."""
    server = OnRay(model, *flags)
    try:
        yield server
    finally:
        below = server.below()
        code = server.stop(number)
        assert code == 0, "".join(server.log)
        assert not still_there(below), "processes are left"


def descendants(pid: int) -> dict[int, str]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
    found, left = dict[int, str](), [pid]
    while left:
        for child in parents.get(left.pop(), []):
            found[child] = command_of(child)
            left.append(child)
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def ports_open_to_all(pid: int) -> set[int]:
    """Ports on which a process listens on all interfaces."""
    inodes = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [(*row[1].split(":"), row[9]) for row in rows if row[3] == "0A"]
    return {
        int(port, 16)
        for address, port, inode in listening
        if inode in inodes and set(address) == {"0"}
    }


def still_there(processes: dict[int, str], seconds: float = SECONDS) -> dict[int, str]:
    """Processes that still run after some seconds."""
    end = time.monotonic() + seconds
    while left := {
        pid: command for pid, command in processes.items() if command and command_of(pid) == command
    }:
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return {}


def text_of(events: list[Any]) -> str:
    """Text of a completion stream, which must have ended."""
    assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1]), events[
        -2:
    ]
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
