"""Seconds that the device takes for work that is queued in its stream."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from headrace.backend.cuda.interpreter import is_interpreting


def synchronise() -> None:
    """Wait for the device."""
    if not is_interpreting():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], rounds: int, times: int = 1) -> list[float]:
    """Device seconds of a run, in each round of several runs, after a run of warm-up.

    In the interpreter the host's clock counts.
    """
    run()
    synchronise()
    if is_interpreting():
        found = []
        for _ in range(rounds):
            begun = time.perf_counter()
            run()
            found.append(time.perf_counter() - begun)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(times):
            run()
        event.record()
    synchronise()
    return [1e-3 * a.elapsed_time(b) / times for a, b in pairwise(events)]
