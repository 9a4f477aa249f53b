"""Signals that end the command line: Ctrl-C, `kill`, and a terminal that goes away. The exit code
is 128 + the signal's number.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Ended(KeyboardInterrupt):
    """A signal that ends the command line."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code."""
        return 128 + self.number


class Stop:
    """The signal that ends the current answer, once one has come."""

    def __init__(self) -> None:
        self.ended: Ended | None = None

    def is_set(self) -> bool:
        """Whether one has come."""
        return self.ended is not None


def raise_when_ended() -> None:
    """From now on a signal raises Ended, and a second one ends the process at once; those that are
    ignored stay so.
    """
    sys.unraisablehook = _unraisable
    _handle(_raise)


def go_on_after(interrupt: KeyboardInterrupt) -> None:
    """Take signals as before after Ctrl-C; what any other signal raised is raised again."""
    if isinstance(interrupt, Ended):
        if interrupt.number != signal.SIGINT:
            raise interrupt
        _handle(_raise)


def exit_when_ended() -> None:
    """From now on a signal ends the process at once: nothing is left to tidy up."""
    _handle(_exit)


@contextmanager
def held() -> Iterator[Stop]:
    """While it lasts, a signal is noted in a `Stop` instead of cutting a step of the engine
    in two.
    """
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.ended = Ended(number)

    previous = _handle(note)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _handle(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Set the handler of all that are not ignored, and return their handlers until now."""
    previous = {number: signal.getsignal(number) for number in _ENDING}
    taken = {number: old for number, old in previous.items() if old != signal.SIG_IGN}
    for number in taken:
        signal.signal(number, handler)
    return taken


def _raise(number: int, frame: FrameType | None) -> None:
    exit_when_ended()
    while frame:
        # Extension modules print an exception that comes while they are imported, and nothing is
        # there to tidy up yet.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _exit(number, None)
        frame = frame.f_back
    raise Ended(number)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """An interrupt that came where it cannot be raised, such as in a callback of the garbage
    collector, must not be lost.
    """
    if isinstance(unraisable.exc_value, Ended):
        os._exit(unraisable.exc_value.code)
    sys.__unraisablehook__(unraisable)
