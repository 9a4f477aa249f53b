"""What a user types or pastes into a chat, turn by turn."""

import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headrace.cli.signals import go_on_after
from headrace.cli.terminal import is_dumb

_SOON = 0.05
"""Seconds in which the next line of a paste is there, and no next line of a typist."""


def set_up() -> None:
    """Give `input` a line editor and a history, where there is one. It then takes a marked paste as
    one line with line ends in it.
    """
    with suppress(ImportError):
        import readline

        if not is_dumb() and "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def read_turn() -> str | None:
    """A line, or several that come together, or that are joined by a backslash at the end; empty
    after Ctrl-C, None at the end.
    """
    text = ""
    try:
        while True:
            line = input("... " if text else "> ")
            if line.endswith("\\"):
                text += line[:-1] + "\n"
            elif _more_is_here():
                text += line + "\n"
            else:
                return text + line
    except KeyboardInterrupt as interrupt:
        print()
        go_on_after(interrupt)
        return ""
    except EOFError:
        print()
        return text or None


def _more_is_here() -> bool:
    """Whether a paste goes on: where it is not marked as one, the line editor returns at its first
    line end.
    """
    try:
        with _unbuffered(sys.stdin.fileno()):
            return bool(select.select([sys.stdin], [], [], _SOON)[0])
    except (OSError, ValueError, ImportError):  # no terminal
        return False


@contextmanager
def _unbuffered(descriptor: int) -> Iterator[None]:
    """While it lasts, the terminal shows what came before this too: else it waits for the end of a
    new line.
    """
    import termios

    before = termios.tcgetattr(descriptor)
    now = [*before]
    now[3] = int(now[3]) & ~termios.ICANON
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
