"""Where a converted model goes: it is there when all of it is, and not before."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import HeadraceError, RequestError


def check_new(out: Path) -> None:
    """Raise RequestError, before any work is done, where nothing new can be made."""
    home = out.absolute().parent
    if os.path.lexists(out):
        raise RequestError(f"{out} is there already: remove it, or name another place")
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise RequestError(
            f"{out}: nothing can be written there; name a place in a folder that exists "
            "and is yours"
        )


def check_room(out: Path, nbytes: int) -> None:
    """Raise RequestError where the disk has less room than so many bytes."""
    free = shutil.disk_usage(out.absolute().parent).free
    if nbytes > free:
        raise RequestError(
            f"{out} would have {nbytes / 1e9:,.2f} GB, and the disk has {free / 1e9:,.2f} GB left"
        )


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A place beside `out` for a file or a folder, which gets the name `out` in the end; if that is
    not reached, nothing of it stays.

    Raises HeadraceError where the disk refuses.
    """
    place = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        try:
            yield place
            for path in (*place.glob("*"), place):
                _settle(path)
            os.rename(place, out)
        except OSError as error:
            raise HeadraceError(f"{out}: {error.strerror or error}") from error
    finally:
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)


def _settle(path: Path) -> None:
    """Have the disk keep a file or folder, so that a name is never that of a file whose content was
    lost.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
