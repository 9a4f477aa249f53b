"""A file that one process at a time may write."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headrace.errors import RequestError

_log = logging.getLogger("headrace.server")


@contextmanager
def locked_for_append(path: Path) -> Iterator[BinaryIO]:
    """Open a file for unbuffered appending, and lock it until the end of the context.

    The lock ends with its process, however that ends. Raises RequestError if the file cannot be
    opened, or another process holds the lock.
    """
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"{path}: {_owner(file)} writes its responses to this file; wait until it ends, "
                "or choose another output file"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            _log.warning("%s: no lock, %s; start one batch at a time", path, error.strerror)
        yield file


def _owner(file: BinaryIO) -> str:
    """Describe the process that holds the lock of a file, by Linux's list of locks."""
    status = os.fstat(file.fileno())
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:  # not Linux
        locks = []
    for fields in map(str.split, locks):
        if "FLOCK" in fields and place in fields and (pid := fields[fields.index(place) - 1]) > "0":
            return f"process {pid}"
    return "another process"
