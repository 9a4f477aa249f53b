"""Texts to calibrate with and to judge by: a file, or the language reference that comes with every
Python.
"""

from pathlib import Path
from typing import Literal

from headrace.errors import RequestError

_EVERY = 4
"""One of so many topics is kept to judge by; the others are to calibrate with, so that no text
serves both.
"""


def read_text(file: Path | None, use: Literal["calibration", "evaluation"]) -> str:
    """The text of a file, or Python's language reference: other parts of it for each use. Raises
    RequestError, which names the file.
    """
    if file is None:
        return _reference(use)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{file}: {error.strerror if isinstance(error, OSError) else 'is no text in UTF-8'}"
        ) from None


def _reference(use: Literal["calibration", "evaluation"]) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RequestError(
            "this Python comes without its language reference: give a text by --text FILE"
        ) from None
    chosen = [
        topics[name]
        for i, name in enumerate(sorted(topics))
        if (i % _EVERY == 0) == (use == "evaluation")
    ]
    return "\n\n".join(chosen)
