"""The record through which another process watches a running engine: a JSON file in a private
folder of the user.

A watching process touches the file `watch` in that folder again and again. An engine reads its age
a few times a second, between two steps, and writes its record to the same folder while the file is
fresh. This takes no thread and no socket, and nothing is written while no process watches. An
engine without work runs no code, so it writes a last record, which says so, when its work ends.
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
"""Version of the record's form."""
WATCH = "watch"
"""Name of the file that a watching process touches. A record has the map of the block pool if the
file says `map`.
"""
FRESH = 3.0
"""Seconds after its last touch for which the file is fresh."""
INTERVAL = 0.25
"""Least seconds between two records."""
MOST_LINES = 200
"""Most sequences that a record lists."""
MOST_BLOCKS = 2**16
"""Blocks of the largest pool whose map goes into a record."""

_numbers = count()


def folder() -> Path:
    """The folder of records: `HEADRACE_STATS`, else one in the user's runtime folder, else one in
    that for temporary files.
    """
    if named := os.environ.get("HEADRACE_STATS"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{_user()}"


def is_private(path: Path) -> bool:
    """Whether this is a folder that belongs to the user, and that no other user may read or
    write.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == _user() and not status.st_mode & 0o077


def read_file(path: Path, most: int) -> bytes:
    """The first `most` bytes of a regular file. Raises OSError, for a pipe, too: nothing that lies
    in the folder can make us wait.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path}: not a regular file")
        return file.read(most)


class Publisher:
    """Writes the record of one engine, which `record(with_map)` makes, with the map of the block
    pool or without.
    """

    def __init__(self, record: Callable[[bool], Mapping[str, Any]]) -> None:
        self._record = record
        self._next = 0.0
        self._folder = folder()
        self._file: Path | None = None
        self._name = f"{os.getpid()}-{next(_numbers)}"

    def tick(self, now: float, *, last: bool = False) -> None:
        """Write a record if a process watches and `INTERVAL` has passed; the last one before the
        engine has no work does not wait.

        `now` is in seconds of the engine's clock.
        """
        if now < self._next and not last:
            return
        self._next = now + INTERVAL
        with suppress(
            OSError
        ):  # no process watches, or the folder is gone or cannot be written: the engine goes on
            watch = self._folder / WATCH
            if time.time() - watch.stat().st_mtime < FRESH and is_private(self._folder):
                self._write(self._record(b"map" in read_file(watch, 64)))

    def close(self) -> None:
        """Remove the record."""
        if self._file:
            with suppress(OSError):
                self._file.unlink()

    def _write(self, record: Mapping[str, Any]) -> None:
        """Replace the record in one piece: a reader sees the old one or the new one."""
        new = self._folder / f".{self._name}.new"
        descriptor = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600
        )
        try:
            with open(descriptor, "w") as file:
                json.dump(record, file, separators=(",", ":"))
            self._file = self._folder / f"{self._name}.json"
            new.replace(self._file)
        except OSError:
            new.unlink()  # half a record, on a disk that is full
            raise


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
