"""Progress of long work on stderr: a bar on a terminal, otherwise lines now and then.

What comes after a semicolon in the name of a step are its current figures, which may change.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.cli.terminal import is_dumb, print_stderr

if TYPE_CHECKING:
    from headrace.measure.progress import ProgressCallback

_FIRST_SECONDS = 5.0
"""Seconds of a step before its first line."""
_SECONDS = 20.0
"""Seconds between two lines."""
_MIN_SHARE = 0.01
"""Share of a step after which its time is estimated."""


@contextmanager
def progress_bar() -> Iterator["ProgressCallback"]:
    """Yield a callback for the current step and its completed share."""
    if not sys.stderr.isatty() or is_dumb():
        yield ProgressLines()
        return

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(step: str, share: float) -> None:
            # A share of 0 starts another step, whose remaining time is estimated separately.
            if share == 0:
                bar.reset(task, total=1.0, description=step)
            bar.update(task, completed=share, description=step)

        yield show


class ProgressLines:
    """Prints the share of a long step, and an estimate of its time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = ""
        self._begun = 0.0
        self._next = 0.0
        self._is_estimated = False

    def __call__(self, step: str, share: float) -> None:
        now = self._clock()
        name = step.partition(";")[0]
        if share == 0 or name != self._step:
            self._step, self._begun = name, now
            self._next, self._is_estimated = now + _FIRST_SECONDS, False
        elapsed = now - self._begun
        if now < self._next or share < _MIN_SHARE or share >= 1:
            return
        if not self._is_estimated:
            print_stderr(f"{step}: {_duration(elapsed / share)} in all, by the first {share:.0%}")
            self._is_estimated = True
        else:
            left = _duration(elapsed / share - elapsed)
            print_stderr(f"{step}: {share:.0%}, {left} left")
        self._next = now + _SECONDS


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes"
