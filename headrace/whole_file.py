"""Files that are written whole or not at all: under another name in their folder, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

UNFINISHED = ".unfinished"
"""The end of the names of files that are not whole yet. A killed process leaves such a file."""

_numbers = count()


def replace_file(
    path: Path, content: str | bytes, *, survives: bool = False, mode: int = 0o666
) -> None:
    """Write a file, or replace it at once: a reader sees the old content or the new.

    Args:
        content: text is written in UTF-8.
        survives: the file has to be whole even after a loss of power; this waits for the disk.
        mode: permissions of the file, less those that the umask of the process takes.

    Raises OSError; the old file then stays, and nothing else.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, survives=survives) as scratch:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)


@contextmanager
def replacing(path: Path, *, survives: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which the caller writes. It takes the place of `path` at the
    end, and is removed after an error. `survives` as for `replace_file`.
    """
    # The name is unique, so two writers of one file do not mix their bytes.
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}{UNFINISHED}")
    try:
        yield scratch
        if survives:
            sync(scratch)
        os.replace(scratch, path)
        if survives:
            sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a killed process left. No other process may write in the folder."""
    for path in folder.iterdir():
        if path.name.endswith(UNFINISHED):
            path.unlink(missing_ok=True)
