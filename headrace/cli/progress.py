"""A progress bar on stderr for the measurements, shown on a terminal only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.measure.progress import ProgressCallback


@contextmanager
def progress_bar() -> Iterator["ProgressCallback"]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=1.0)

        def show(step: str, share: float) -> None:
            # A share of 0 starts another step, whose remaining time is estimated separately.
            if share == 0:
                bar.reset(task, total=1.0, description=step)
            bar.update(task, completed=share, description=step)

        yield show
