"""Shared parts of the scenarios: the server under test, the memory of its processes, and a report
of criteria.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

sys.path.append(
    str(Path(__file__).resolve().parents[2])
)  # tests/ lends a server that runs in a process, and a tiny model

from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Running


class Findings:
    """The criteria of a scenario. Every line is printed at once."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        """Seconds for scenarios with a variable length; None: their default."""
        self.num_failed = 0

    def holds(self, ok: bool, what: str) -> None:
        """Report a criterion with its figures."""
        self.num_failed += not ok
        print(f"  {'ok    ' if ok else 'FAILED'} {what}", flush=True)

    def says(self, what: str) -> None:
        """Report figures without a criterion."""
        print(f"         {what}", flush=True)


class Held(NamedTuple):
    """Resources of a process."""

    anon: int
    """Bytes of anonymous memory, resident or swapped."""
    fds: int
    threads: int


def held(pid: int) -> Held:
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    anon = sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))
    return Held(anon, len(os.listdir(f"/proc/{pid}/fd")), int(lines["Threads"]))


def children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return [int(child) for child in found]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Watch:
    """Samples of the resources of API process and engine process, once a second."""

    def __init__(self, server: Running) -> None:
        self._pids = {"API process": server.process.pid, "engine process": server.engine_pid}
        self._begun = time.monotonic()
        self.samples: dict[str, list[tuple[float, Held]]] = {name: [] for name in self._pids}

    def look(self) -> None:
        for name, pid in self._pids.items():
            self.samples[name].append((time.monotonic() - self._begun, held(pid)))

    def mean_anon(self, name: str, begin: float, end: float) -> float:
        """Mean anonymous memory between two times, in bytes."""
        return statistics.mean(one.anon for at, one in self.samples[name] if begin <= at <= end)

    def growth_per_second(self, name: str, begin: float) -> float:
        """Slope of the anonymous memory after a time, in bytes per second."""
        points = [(at, one.anon) for at, one in self.samples[name] if at >= begin]
        return statistics.linear_regression(
            [at for at, _ in points], [anon for _, anon in points]
        ).slope


def check_rest(findings: Findings, server: Running, seconds: float) -> None:
    """Check that all requests have ended: none runs or waits, all blocks are free, and no more
    steps run.
    """
    took = wait(server.at_rest, seconds)
    figures = server.figures()
    free, blocks = figures["headrace_kv_blocks_free"], figures["headrace_kv_blocks"]
    findings.holds(
        took is not None,
        f"at rest {took or seconds:.2f} s after the last close (at most {seconds:g}), "
        f"{free:,.0f} of {blocks:,.0f} blocks free",
    )
    time.sleep(0.5)  # for the last report
    steps = server.figures()["headrace_steps_total"]
    time.sleep(1)
    findings.holds(
        server.at_rest() and server.figures()["headrace_steps_total"] == steps,
        "no steps without requests",
    )


def check_steady(
    findings: Findings, name: str, samples: list[tuple[float, Held]], warm: float
) -> None:
    """Check that an idle process has no more files and threads than before. The first and last
    sample are taken when it is idle.
    """
    begin, end = samples[0][1], samples[-1][1]
    max_threads = max(one.threads for at, one in samples[:-1] if at <= 2 * warm)
    findings.holds(
        end.threads <= max_threads, f"{name}: {end.threads} threads (at most {max_threads} before)"
    )
    findings.holds(
        end.fds <= begin.fds + 1,
        f"{name}: {end.fds} files open ({begin.fds} before, and one for the question)",
    )


def wait(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition holds; None if it does not hold in time."""
    begun = time.monotonic()
    while (took := time.monotonic() - begun) < seconds:
        with contextlib.suppress(ConnectionError):
            if condition():
                return took
        time.sleep(0.01)
    return None


def percentile(values: list[float], percent: float) -> float:
    """0 without values."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)] if values else 0.0


@lru_cache(maxsize=1)
def tiny_model() -> str:
    """A model with random weights and steps of 0.2 ms, for scenarios that do not depend on
    arithmetic.
    """
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    return str(write_tiny_gguf(Path(folder.name) / "tiny.gguf", {"llama.context_length": 4096}))


_kept: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def serving(findings: Findings, model: str, *flags: str) -> Iterator[Running]:
    """A server that must end by SIGTERM."""
    server = Running(model, *flags)
    try:
        yield server
    finally:
        code = server.stop()
        findings.holds(code == 0, f"the server ends with exit code {code}")
        errors = [
            line.rstrip()
            for line in server.log
            if " ERROR " in line or line.startswith("headrace: ")
        ]
        for line in errors[-20:]:
            findings.says(line)
