"""The record through which another process watches a running engine.

The watching process touches the file `watch` in a private folder. While it is fresh, the engine
writes a JSON file there between two steps, without a thread or socket.
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

from headrace.whole_file import replace_file

VERSION = 3
WATCH = "watch"
"""The file that a watching process touches. With the text `map`, records include the block map."""
FRESH = 3.0
"""Seconds."""
INTERVAL = 0.25
"""Min seconds between two records."""
MAX_SEQUENCES = 200
MAX_BLOCKS = 2**16

_numbers = count()


def folder() -> Path:
    """Return `HEADRACE_STATS`, else a folder in the user's runtime folder, else a temporary one."""
    if named := os.environ.get("HEADRACE_STATS"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{_user()}"


def is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == _user() and not status.st_mode & 0o077


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the first bytes of a regular file. Raises OSError for others: a pipe would block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path}: not a regular file")
        return file.read(max_bytes)


class Publisher:
    def __init__(self, record: Callable[[bool], Mapping[str, Any]]) -> None:
        self._record = record
        self._next = 0.0
        self._folder = folder()
        self._file: Path | None = None
        self._name = f"{os.getpid()}-{next(_numbers)}"

    def tick(self, now: float, *, last: bool = False) -> None:
        """Write a record if a process watches and `INTERVAL` has passed.

        `now` is in seconds. `last` skips the interval.
        """
        if now < self._next and not last:
            return
        self._next = now + INTERVAL
        # An OSError means that no process watches, or that the folder cannot be written. Either way
        # the engine continues.
        with suppress(OSError):
            watch = self._folder / WATCH
            if time.time() - watch.stat().st_mtime < FRESH and is_private(self._folder):
                self._write(self._record(b"map" in read_file(watch, 64)))

    def close(self) -> None:
        if self._file:
            with suppress(OSError):
                self._file.unlink()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file = self._folder / f"{self._name}.json"
        replace_file(self._file, json.dumps(record, separators=(",", ":")), mode=0o600)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
