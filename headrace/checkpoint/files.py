"""Reads untrusted files."""

import errno
import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import FormatError, MemoryLimitError, ModelNotFoundError

MAX_CONFIG_BYTES = 16 << 20
"""The largest known files have 2 MB."""
_MAX_NAME_BYTES = 255
_MAX_JSON_VALUES = 2_000_000
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")


def map_file(path: Path) -> mmap.mmap:
    """Map a file, read-only. Raises ModelNotFoundError, FormatError, MemoryLimitError."""
    with _opened(path) as (descriptor, size):
        if size == 0:
            raise FormatError(f"{path.name}: the file is empty")
        _check_not_html(path, os.pread(descriptor, 64, 0))
        try:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryLimitError(
                    f"{path.name}: its {size:,} bytes do not fit into the address space of this "
                    "process; raise its limit (ulimit -v)"
                ) from error
            raise FormatError(f"{path.name}: cannot be mapped: {error.strerror}") from error


def read_file(path: Path, limit: int) -> bytes:
    """Read at most `limit` bytes. Raises ModelNotFoundError or FormatError."""
    with _opened(path) as (descriptor, size):
        if size > limit:
            raise FormatError(f"{path.name}: {size:,} bytes, more than the limit of {limit:,}")
        try:
            with open(descriptor, "rb", closefd=False) as file:
                # Bytes that are appended meanwhile are left out.
                return file.read(size)
        except OSError as error:
            raise ModelNotFoundError(f"{path}: {error.strerror}") from error


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object. Raises as `read_file`."""
    text = read_file(path, limit)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_JSON_VALUES:
        raise FormatError(f"{path.name}: more than the limit of {_MAX_JSON_VALUES:,} values")
    _check_not_html(path, text[:64])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name}: expected a JSON object, found {type(value).__name__}")
    return value


def member(folder: Path, name: str) -> Path:
    """The path of a file that another file names; it need not exist.

    Raises FormatError for a path, and for links that leave the folder or are circular. Links of
    the Hugging Face cache are accepted.
    """
    plain = (
        name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and not any(character in name for character in "/\\:")
    )
    if name in ("", ".", "..") or not plain:
        raise FormatError(f"{folder.name}: file name {name[:100]!r} is not a plain name")
    path = folder / name
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    allowed = [home]
    allowed += [
        parent.parent / "blobs"
        for parent in (home.parent, home.parent.parent)
        if parent.name == "snapshots"
    ]
    if target.parent not in allowed:
        raise FormatError(
            f"{folder.name}: {name} is a link that leaves the folder; copy the file into the folder"
        )
    # realpath stops inside a circle of links.
    if target.is_symlink():
        raise FormatError(f"{folder.name}: {name} is a circular link; replace it with the file")
    return path


def find(folder: Path, name: str) -> Path | None:
    """The path if the file or a broken link exists. Raises as `member`."""
    return member(folder, name) if os.path.lexists(folder / name) else None


def list_names(folder: Path) -> list[str]:
    """Sorted. Raises ModelNotFoundError."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise ModelNotFoundError(f"{folder}: {error.strerror}") from error


def _check_not_html(path: Path, start: bytes) -> None:
    if start.lstrip().lower().startswith(_HTML):
        raise FormatError(
            f"{path.name}: a web page, not the file; the address of the download led to a page, "
            "such as a login. Download the file again"
        )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    # Without O_NONBLOCK, opening a pipe that was left in the folder would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path}: {getattr(error, 'strerror', error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path.name}: not a regular file; name a file or a folder")
        if os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER:
            raise FormatError(
                f"{path.name}: a pointer of Git LFS ({status.st_size:,} bytes), not the file "
                "itself; run `git lfs pull` in its repository, or download the file"
            )
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)
