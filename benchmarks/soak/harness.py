"""What the scenarios share: the server under test and its figures, what its processes hold, and a
record of what held and what did not.
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
    """What a scenario found; every line is printed as it comes."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        """For how long a scenario of a given length shall run; None: as long as its criterion says.
        """
        self.num_failed = 0

    def holds(self, ok: bool, what: str) -> None:
        """A criterion, with its figures."""
        self.num_failed += not ok
        print(f"  {'ok    ' if ok else 'FAILED'} {what}", flush=True)

    def says(self, what: str) -> None:
        """Figures without a criterion."""
        print(f"         {what}", flush=True)


class Held(NamedTuple):
    """What a process holds."""

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
    """Processes that a process started."""
    return [
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Watch:
    """Samples of what API process and engine process hold, once a second while a scenario asks for
    them.
    """

    def __init__(self, server: Running) -> None:
        self._pids = {"API process": server.process.pid, "engine process": server.engine_pid}
        self._begun = time.monotonic()
        self.samples: dict[str, list[tuple[float, Held]]] = {name: [] for name in self._pids}

    def look(self) -> None:
        for name, pid in self._pids.items():
            self.samples[name].append((time.monotonic() - self._begun, held(pid)))

    def mean_anon(self, name: str, begin: float, end: float) -> float:
        """Mean of the anonymous memory between two times, in bytes."""
        return statistics.mean(one.anon for at, one in self.samples[name] if begin <= at <= end)

    def growth_per_second(self, name: str, begin: float) -> float:
        """Slope of the anonymous memory from a time on, in bytes per second."""
        points = [(at, one.anon) for at, one in self.samples[name] if at >= begin]
        return statistics.linear_regression(
            [at for at, _ in points], [anon for _, anon in points]
        ).slope


def check_rest(findings: Findings, server: Running, seconds: float) -> None:
    """All requests have ended: nothing runs or waits, all blocks are free, and no steps are made
    any more.
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
    """Files and threads of a process at rest before and after are no more, once it is warm; its
    first and last sample are taken at rest.
    """
    begin, end = samples[0][1], samples[-1][1]
    most = max(one.threads for at, one in samples[:-1] if at <= 2 * warm)
    findings.holds(end.threads <= most, f"{name}: {end.threads} threads (at most {most} before)")
    findings.holds(
        end.fds <= begin.fds + 1,
        f"{name}: {end.fds} files open ({begin.fds} before, and one for the question)",
    )


def wait(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until it holds; None where it does not within so many."""
    begun = time.monotonic()
    while (took := time.monotonic() - begun) < seconds:
        with contextlib.suppress(ConnectionError):
            if condition():
                return took
        time.sleep(0.01)
    return None


def percentile(values: list[float], percent: float) -> float:
    """0 for no values."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)] if values else 0.0


@lru_cache(maxsize=1)
def tiny_model() -> str:
    """A file of a model with random weights, for scenarios in which the engine's arithmetic does
    not matter: a step takes 0.2 ms.
    """
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    return str(write_tiny_gguf(Path(folder.name) / "tiny.gguf", {"llama.context_length": 4096}))


_kept: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def serving(findings: Findings, model: str, *flags: str) -> Iterator[Running]:
    """A server that ends by SIGTERM, as it should."""
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
