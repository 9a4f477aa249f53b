"""Runs the cases of a target in child processes, so that no case can end the run."""

import faulthandler
import json
import math
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO

from headrace.errors import HeadraceError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
SECONDS_PER_CASE = 10
"""CPU time, so that other load on the machine causes no findings."""
PATIENCE = 120.0
"""Wall-clock seconds for a case that waits."""
MEMORY = 512 << 20
"""Bytes by which a target's process may grow."""
MAX_FINDINGS = 20
"""Findings of a target after which its run ends."""


@dataclass(frozen=True)
class Finding:
    """A forbidden result of a case."""

    target: str
    label: str
    """A number, or the name of a file of the corpus."""
    what: str
    content: bytes


@dataclass
class Outcome:
    """The result of a target's run."""

    cases: int = 0
    refused: int = 0
    """Cases that ended in an error of our own."""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def targets() -> list[str]:
    return sorted(
        f.stem
        for f in HERE.glob("*.py")
        if not f.stem.startswith("_") and "\ndef case(" in f.read_text()
    )


def load(target: str) -> ModuleType:
    return import_module(f"tests.fuzz.{target}")


@dataclass(frozen=True)
class Cases:
    """The cases of a target: the files of its corpus, then generated ones."""

    target: str
    seed: int
    count: int
    corpus: Path

    def __call__(self, first: int) -> Iterator[tuple[str, bytes]]:
        """Yield label and content of each case."""
        kept = sorted((self.corpus / self.target).glob("*"))
        for i in range(first, self.count):
            if i < len(kept):
                yield kept[i].name, kept[i].read_bytes()
            else:
                yield (
                    str(i),
                    load(self.target).case(random.Random(f"{self.seed} {self.target} {i}")),
                )


def run_target(
    target: str, count: int, seconds: float = float("inf"), seed: int = 0, corpus: Path = CORPUS
) -> Outcome:
    """Run up to `count` cases for up to `seconds`; a new child follows a child that a
    case ends.
    """
    outcome, start, cases = Outcome(), time.monotonic(), Cases(target, seed, count, corpus)
    while (
        outcome.cases < count
        and time.monotonic() - start < seconds
        and len(outcome.findings) < MAX_FINDINGS
    ):
        with _Child(cases, outcome.cases) as child:
            child.watch(outcome, start + seconds)
    outcome.seconds = time.monotonic() - start
    return outcome


class _Child:
    """A process that runs cases and reports them on stdout."""

    def __init__(self, cases: Cases, first: int) -> None:
        self._cases = cases
        self._faults: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        given = (cases.target, cases.seed, cases.count, cases.corpus, first, self._faults.fileno())
        command = [sys.executable, "-m", "tests.fuzz", "--child", *map(str, given)]
        # Rust prints a panic before it becomes an exception; here there are thousands.
        environment = {
            **os.environ,
            "RUST_BACKTRACE": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
            pass_fds=[self._faults.fileno()],
        )

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._faults.close()

    def watch(self, outcome: Outcome, deadline: float) -> None:
        """Follow the process until it ends, is too slow, or the time is up."""
        assert self._process.stdout
        stdout, buffer, patience = self._process.stdout.fileno(), b"", PATIENCE
        while time.monotonic() < deadline:
            if not select.select(
                [stdout], [], [], min(patience, max(0.0, deadline - time.monotonic()))
            )[0]:
                if time.monotonic() < deadline:
                    self._add(outcome, f"it did not end within {patience:g} s")
                return
            if not (chunk := os.read(stdout, 1 << 16)):
                self._ended(outcome)
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            patience = getattr(load(self._cases.target), "PATIENCE", PATIENCE)
            for line in lines:
                kind, *rest = json.loads(line)
                outcome.cases += kind in ("returned", "refused", "finding")
                outcome.refused += kind == "refused"
                if kind == "finding":
                    self._add(outcome, *rest, ended=1)
                    if len(outcome.findings) == MAX_FINDINGS:
                        return

    def _ended(self, outcome: Outcome) -> None:
        code = self._process.wait()
        if code == 0:
            return
        self._faults.seek(0)
        what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._add(
            outcome,
            f"the process ended: {what}\n{self._faults.read(4000).decode(errors='replace')}",
        )

    def _add(self, outcome: Outcome, what: str, ended: int = 0) -> None:
        """Note a finding of the running case or, with `ended`, of the last one."""
        outcome.cases += not ended
        label, content = next(self._cases(outcome.cases - 1), ("none", b""))
        outcome.findings.append(Finding(self._cases.target, label, what, content))


def child(cases: Cases, first: int, faults: int) -> None:
    """Run the cases, and write a JSON line with the result of each."""
    faulthandler.enable(faults)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    module = load(cases.target)
    memory, seconds = (
        getattr(module, "MEMORY", MEMORY),
        getattr(module, "SECONDS_PER_CASE", SECONDS_PER_CASE),
    )
    with suppress(HeadraceError):
        module.run(
            module.case(random.Random(0))
        )  # what is made once is made now, and is not a case's
    peak = resident = _peak()
    # Beyond four times the growth that is a finding, even a library that ends the process where it
    # gets no memory shows itself.
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 4 * memory, resource.RLIM_INFINITY))
    for _, content in cases(first):
        resource.setrlimit(
            resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, resource.RLIM_INFINITY)
        )
        kind = attempt(module, content)
        if (peak := max(peak, _peak())) > resident + memory:
            kind = ("finding", f"the process grew by {peak - resident:,} bytes")
        out.write(json.dumps(kind).encode() + b"\n")
        if peak > resident + memory:
            sys.exit(0)


def attempt(module: ModuleType, content: bytes) -> tuple[str, ...]:
    """Run a case: `returned`, `refused`, or `finding` and a traceback."""
    try:
        module.run(content)
    except HeadraceError:
        return ("refused",)
    except BaseException as error:  # panics of Rust are no Exception
        return ("finding", "".join(traceback.format_exception(error)))
    return ("returned",)


def _peak() -> int:
    """Peak memory of this process in bytes; `ru_maxrss` starts with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
