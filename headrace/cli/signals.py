"""Signals that end the command line: Ctrl-C, `kill`, and a terminal that closes.

The exit code is 128 + the number of the signal.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Ended(KeyboardInterrupt):
    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        return 128 + self.number


class Stop:
    def __init__(self) -> None:
        self.ended: Ended | None = None

    def is_set(self) -> bool:
        return self.ended is not None


def raise_on_signal() -> None:
    """The first signal raises Ended, a second ends the process. Ignored signals stay ignored."""
    sys.unraisablehook = _unraisable
    _set_handler(_raise)


def resume_after(interrupt: KeyboardInterrupt) -> None:
    """Accept the next Ctrl-C; raises any other signal again."""
    if isinstance(interrupt, Ended):
        if interrupt.number != signal.SIGINT:
            raise interrupt
        _set_handler(_raise)


def exit_on_signal() -> None:
    _set_handler(_exit)


@contextmanager
def deferred() -> Iterator[Stop]:
    """Store a signal in a `Stop`, so that it interrupts no engine step."""
    stop = Stop()

    def store(number: int, frame: FrameType | None) -> None:
        stop.ended = Ended(number)

    previous = _set_handler(store)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _set_handler(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: old for number, old in handlers.items() if old != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handler)
    return previous


def _raise(number: int, frame: FrameType | None) -> None:
    exit_on_signal()
    while frame:
        # Extension modules print an exception that arrives while they are imported; at that time
        # there is nothing to clean up.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _exit(number, None)
        frame = frame.f_back
    raise Ended(number)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if isinstance(unraisable.exc_value, Ended):
        os._exit(unraisable.exc_value.code)
    sys.__unraisablehook__(unraisable)
