"""Opening model files: regular files only, memory-mapped, and never outside the folder that names them."""

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from headrace.errors import FormatError, ModelNotFoundError

_MAX_JSON_BYTES = 64 << 20


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of a regular file.

    Raises ModelNotFoundError where there is none, FormatError for an empty file, a pipe, a device or a folder.
    """
    # Without O_NONBLOCK, opening a pipe that was left in the folder would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise ModelNotFoundError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path.name}: not a regular file")
        if status.st_size == 0:
            raise FormatError(f"{path.name}: the file is empty")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def member(folder: Path, name: str) -> Path:
    """The file `name` of `folder`, for names that a downloaded file brings.

    A name with a path in it, or a link that leaves the folder, is a FormatError. The one layout with links that we accept
    is the Hugging Face cache, whose `snapshots/REVISION/NAME` points to `blobs/HASH`.
    """
    if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
        raise FormatError(f"{folder.name}: file name {name[:100]!r} is not a plain name")
    path = folder / name
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if path.resolve().parent not in allowed:
        raise FormatError(f"{folder.name}: {name} is a link that leaves the folder")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelNotFoundError, or FormatError for anything that is not a JSON object."""
    with map_file(path) as data:
        if len(data) > _MAX_JSON_BYTES:
            raise FormatError(f"{path.name}: {len(data):,} bytes of JSON, more than {_MAX_JSON_BYTES:,}")
        text = data[:]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name}: a JSON object is expected, found {type(value).__name__}")
    return value
