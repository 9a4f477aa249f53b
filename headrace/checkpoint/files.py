"""The files of a checkpoint, none of which is trusted: regular ones only, of bounded size, and
never outside the folder that names them.
"""

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
"""Of `config.json` and its like; the largest known ones list many tokens or layers, in 2 MB."""
_MAX_NAME_BYTES = 255
_MAX_JSON_VALUES = 2_000_000
"""In one file: objects and numbers cost far more in memory than in JSON, so they are counted before
any is built.
"""


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of a regular file.

    Raises ModelNotFoundError where it cannot be opened, FormatError for an empty file, a pipe, a
    device or a folder.
    """
    with _opened(path) as (descriptor, size):
        if size == 0:
            raise FormatError(f"{path.name}: the file is empty")
        try:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryLimitError(
                    f"{path.name}: there is no room to map its {size:,} bytes in this process"
                ) from error
            raise FormatError(f"{path.name}: it cannot be mapped: {error.strerror}") from error


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises ModelNotFoundError where it
    cannot be read, or FormatError.
    """
    with _opened(path) as (descriptor, size):
        if size > limit:
            raise FormatError(f"{path.name}: {size:,} bytes, more than {limit:,}")
        try:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(size)  # and not what others may append meanwhile
        except OSError as error:
            raise ModelNotFoundError(f"{path}: {error.strerror}") from error


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes. Raises as `read_file`, and FormatError
    for anything but a JSON object.
    """
    text = read_file(path, limit)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_JSON_VALUES:
        raise FormatError(f"{path.name}: more than {_MAX_JSON_VALUES:,} values")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name}: a JSON object is expected, found {type(value).__name__}")
    return value


def member(folder: Path, name: str) -> Path:
    """The path of the file `name` of `folder`, for names that a downloaded file brings; whether
    there is one is not asked.

    A name with a path in it, or a link that leaves the folder or goes round in circles, is a
    FormatError. The one layout with links that we accept is the Hugging Face cache, whose
    `snapshots/REVISION/NAME`, or one in a folder there, points to `blobs/HASH`.
    """
    plain = (
        name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and not any(character in name for character in "/\\:")
    )
    if name in ("", ".", "..") or not plain:
        raise FormatError(f"{folder.name}: file name {name[:100]!r} is not a plain name")
    path = folder / name
    home, target = (
        Path(os.path.realpath(folder)),
        Path(os.path.realpath(path)),
    )  # of a circle, a link in it
    allowed = [home]
    allowed += [
        parent.parent / "blobs"
        for parent in (home.parent, home.parent.parent)
        if parent.name == "snapshots"
    ]
    if target.parent not in allowed:
        raise FormatError(f"{folder.name}: {name} is a link that leaves the folder")
    if target.is_symlink():
        raise FormatError(f"{folder.name}: {name} is a link that goes round in circles")
    return path


def find(folder: Path, name: str) -> Path | None:
    """The path of the file `name`, None where there is none. Raises as `member`; a link to nothing
    is there, and cannot be opened.
    """
    return member(folder, name) if os.path.lexists(folder / name) else None


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises ModelNotFoundError."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise ModelNotFoundError(f"{folder}: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a regular file."""
    # Without O_NONBLOCK, opening a pipe that was left in the folder would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path}: {getattr(error, 'strerror', error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path.name}: not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)
