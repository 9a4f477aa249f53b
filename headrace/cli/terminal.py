"""Text for the user, on stdout and stderr."""

import os
import re
import sys
from contextlib import suppress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_stdout(text: str) -> None:
    """Write immediately; a terminal gets no control characters from a model."""
    sys.stdout.write(_CONTROLS.sub("", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def print_stderr(line: str, end: str = "\n") -> None:
    """Print a line on stderr, and ignore errors."""
    with suppress(OSError):
        print(line, file=sys.stderr, end=end, flush=True)


def show_status(text: str) -> None:
    """Show the current step on a terminal; "" clears it."""
    if sys.stderr.isatty():
        print_stderr(f"\r\x1b[K{text}", end="")
