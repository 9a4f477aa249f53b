"""Files that a verb is told to write."""

import os
from pathlib import Path

from headrace.errors import HeadraceError, RequestError


def check_writable(flag: str, path: Path) -> None:
    """Raise RequestError, before any work is done, where no such file can be written."""
    home = path.absolute().parent
    if (
        path.is_dir()
        or not home.is_dir()
        or not os.access(path if path.exists() else home, os.W_OK)
    ):
        raise RequestError(
            f"{flag} {path}: no file can be written there; name a file in a folder that "
            "exists and is yours"
        )


def write(flag: str, path: Path, text: str, *, append: bool = False) -> None:
    """Write or append the text. Raises HeadraceError."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise HeadraceError(f"{flag} {path}: {error.strerror}") from None
