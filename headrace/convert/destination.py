import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import HeadraceError, RequestError
from headrace.whole_file import sync


def check_destination(out: Path) -> None:
    parent = out.absolute().parent
    if os.path.lexists(out):
        raise RequestError(f"{out} exists; remove it, or name another place")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RequestError(
            f"{out} cannot be written; name a place in a folder that exists and that you may write"
        )


def check_disk_space(out: Path, nbytes: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if nbytes > free:
        raise RequestError(
            f"{out} needs {nbytes / 1e9:,.2f} GB, but the disk has {free / 1e9:,.2f} GB free; "
            "free some space, or name a place on another disk"
        )


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a path that is renamed to `out` at the end. Raises HeadraceError if the disk
    refuses.
    """
    scratch = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        try:
            yield scratch
            for path in (*scratch.glob("*"), scratch):
                sync(path)
            os.rename(scratch, out)
            sync(out.absolute().parent)
        except OSError as error:
            raise HeadraceError(
                f"{out}: {error.strerror or error}; choose another place for the output"
            ) from error
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)
