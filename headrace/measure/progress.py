from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

ProgressCallback = Callable[[str, float], None]
"""Receives the current step and its completed share, from 0 to 1."""


def ignore_progress(step: str, share: float) -> None:
    """Discard the progress: the default callback."""


def track(
    items: Iterable[_T], total: int, step: str, on_progress: ProgressCallback
) -> Iterator[_T]:
    """Yield the items, and report the completed share of `total`."""
    on_progress(step, 0.0)
    for count, item in enumerate(items, 1):
        yield item
        on_progress(step, count / total)
