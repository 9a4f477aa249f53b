"""Text for the user, on stdout and stderr."""

import os
import re
import sys
from contextlib import suppress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_stdout(text: str) -> None:
    """Write text to stdout immediately.

    On a terminal, control characters are removed: the output of a model must not steer it.
    """
    sys.stdout.write(_CONTROLS.sub("", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def is_dumb() -> bool:
    """Whether the terminal can only show lines."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def print_stderr(line: str, end: str = "\n") -> None:
    """Print a line on stderr. An error is ignored: stdout and the exit code carry the result."""
    with suppress(OSError):
        print(line, file=sys.stderr, end=end, flush=True)


def show_status(text: str) -> None:
    """Show the current step on stderr if it is a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print_stderr(f"\r\x1b[K{text}", end="")
