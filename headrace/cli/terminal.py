"""Text on its way to the user."""

import os
import re
import sys
from contextlib import suppress

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Put text on stdout at once. On a terminal, control characters are left out: a model must not
    steer it.
    """
    sys.stdout.write(_CONTROLS.sub("", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def is_dumb() -> bool:
    """Whether the terminal shows nothing but lines."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def say(line: str, end: str = "\n") -> None:
    """Put a line on stderr. One that cannot be read costs nothing: the answer and the exit code say
    what counts.
    """
    with suppress(OSError):
        print(line, file=sys.stderr, end=end, flush=True)


def show_status(what: str) -> None:
    """Say what is going on, to a terminal only; the next message takes its place, and an empty one
    clears it.
    """
    if sys.stderr.isatty():
        say(f"\r\x1b[K{what}", end="")
