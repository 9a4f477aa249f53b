"""Progress of a measurement, reported through a callback."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

ProgressCallback = Callable[[str, float], None]
"""Receives the name of the current step and the completed share of that step, from 0 to 1."""


def ignore_progress(step: str, share: float) -> None:
    """Discard the progress: the default callback."""


def track(
    items: Iterable[_T], total: int, step: str, on_progress: ProgressCallback
) -> Iterator[_T]:
    """Yield the items, and report the share of `total` that has been processed."""
    on_progress(step, 0.0)
    for count, item in enumerate(items, 1):
        yield item
        on_progress(step, count / total)
