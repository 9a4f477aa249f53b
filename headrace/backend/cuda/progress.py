"""Progress bar for long work, on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def with_progress(items: Iterable[_T], total: int, description: str) -> Iterator[_T]:
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, total, console=Console(stderr=True), transient=True)
