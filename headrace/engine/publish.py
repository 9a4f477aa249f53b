"""How a running engine is seen from another process: a record in a folder of the user, written only while somebody looks.

Who looks keeps the file `watch` there fresh. An engine asks for its age a few times a second, between two steps, and as long
as it is fresh puts a JSON record beside it. No thread, no socket, and nothing on disk when nobody looks. An engine that has
no work cannot write: the last thing it does before is to say that it is idle.
"""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

VERSION = 2
"""Of the record's form."""
WATCH = "watch"
FRESH = 3.0
"""Seconds for which a look counts."""
INTERVAL = 0.25
"""Least seconds between two records."""
MOST_LINES = 200
"""Sequences that a record names."""
MOST_BLOCKS = 2**16
"""Blocks of the largest pool whose map goes into a record."""

_numbers = count()


def folder() -> Path:
    """Where records are: `HEADRACE_STATS`, else in the user's runtime folder, else in that for temporary files."""
    if named := os.environ.get("HEADRACE_STATS"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{_user()}"


def is_private(path: Path) -> bool:
    """Whether this is a folder of our own that nobody else may write to or read."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == _user() and not status.st_mode & 0o077


class Publisher:
    """Writes the record of one engine. `record(with_map)` makes it."""

    def __init__(self, record: Callable[[bool], Mapping[str, Any]]) -> None:
        self._record = record
        self._next = 0.0
        self._folder = folder()
        self._file: Path | None = None
        self._name = f"{os.getpid()}-{next(_numbers)}"

    def tick(self, now: float, *, last: bool = False) -> None:
        """Write a record if one is wanted and due; the last one before the engine is idle is due always."""
        if now < self._next and not last:
            return
        self._next = now + INTERVAL
        with suppress(OSError):  # nobody looks, or the folder is gone: that must not hurt who computes
            watch = self._folder / WATCH
            if time.time() - watch.stat().st_mtime < FRESH and is_private(self._folder):
                self._write(self._record(b"map" in watch.read_bytes()[:64]))

    def close(self) -> None:
        """Take the record away."""
        if self._file:
            with suppress(OSError):
                self._file.unlink()

    def _write(self, record: Mapping[str, Any]) -> None:
        """In one piece: a reader sees the old record or the new one."""
        new = self._folder / f".{self._name}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(descriptor, "w") as file:
            json.dump(record, file, separators=(",", ":"))
        self._file = self._folder / f"{self._name}.json"
        new.replace(self._file)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
