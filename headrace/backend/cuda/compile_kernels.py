"""Kernels of many launches, compiled on all cores before the first of them runs; and the
progress bar of such work.
"""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import triton

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import Launch

_T = TypeVar("_T")

_log = logging.getLogger("headrace.loader")


def compile_kernels(launches: Iterable[Launch]) -> None:
    """Compile each distinct kernel once, or read it from Triton's cache.

    A kernel that cannot be compiled raises its error when it is launched.
    """
    if is_interpreting():
        return
    started = time.perf_counter()
    with ThreadPoolExecutor() as executor:
        with triton.AsyncCompileMode(executor, ignore_errors=True) as mode:
            for launch in launches:
                launch.compile()
            futures = mode.raw_futures
            for _ in with_progress(as_completed(futures), len(futures), "kernels"):
                pass
        for launcher in [executor.submit(_make_launcher, k) for k in mode.future_kernels.values()]:
            launcher.result()
    if futures:
        _log.info(
            "compiled %d kernels in %.1f s; their cache is %s",
            len(futures),
            time.perf_counter() - started,
            triton.knobs.cache.dir,
        )


def _make_launcher(kernel: Any) -> None:
    """Let gcc compile the kernel's launcher into Triton's cache, if Triton needs one."""
    if compiled := kernel.result(ignore_errors=True):
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def with_progress(items: Iterable[_T], total: int, description: str) -> Iterator[_T]:
    """Yield the items, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, total, console=Console(stderr=True), transient=True)
