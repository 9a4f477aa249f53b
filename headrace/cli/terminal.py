"""Text of a model on its way to the user."""

import re
import sys

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Put text on stdout at once. On a terminal, control characters are left out: a model must not steer it."""
    sys.stdout.write(_CONTROLS.sub("", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
