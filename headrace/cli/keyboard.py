"""Text that a user types or pastes into a chat."""

import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headrace.cli.signals import resume_after
from headrace.cli.terminal import is_dumb

_PASTE_SECONDS = 0.05
"""Seconds within which the next line of a paste arrives."""


def enable_line_editor() -> None:
    """Give `input` line editing, history and bracketed paste, if readline is installed."""
    with suppress(ImportError):
        import readline

        if not is_dumb() and "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def read_turn() -> str | None:
    """Read a line, pasted lines, or lines joined by a backslash.

    Returns "" after Ctrl-C, None at the end.
    """
    text = ""
    try:
        while True:
            line = input("... " if text else "> ")
            if line.endswith("\\"):
                text += line[:-1] + "\n"
            elif _has_more_input():
                text += line + "\n"
            else:
                return text + line
    except KeyboardInterrupt as interrupt:
        print()
        resume_after(interrupt)
        return ""
    except EOFError:
        print()
        return text or None


def _has_more_input() -> bool:
    try:
        with _unbuffered(sys.stdin.fileno()):
            return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])
    except (OSError, ValueError, ImportError):  # stdin is no terminal
        return False


@contextmanager
def _unbuffered(descriptor: int) -> Iterator[None]:
    """Let the terminal pass on an incomplete line, which it would hold back until its end."""
    import termios

    before = termios.tcgetattr(descriptor)
    now = [*before]
    now[3] = int(now[3]) & ~termios.ICANON
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
