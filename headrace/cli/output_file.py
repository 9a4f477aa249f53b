"""Files that a command writes."""

import os
from pathlib import Path

from headrace.errors import HeadraceError, RequestError


def check_writable(flag: str, path: Path) -> None:
    """Raise RequestError, before any work, if the file cannot be written."""
    folder = path.absolute().parent
    is_writable = os.access(path if path.exists() else folder, os.W_OK)
    if path.is_dir() or not folder.is_dir() or not is_writable:
        raise RequestError(
            f"{flag} {path}: the file cannot be written; name a file in a folder that exists and "
            "that you may write to"
        )


def write(flag: str, path: Path, text: str, *, append: bool = False) -> None:
    """Raises HeadraceError."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise HeadraceError(f"{flag} {path}: {error.strerror}") from None
