"""The machine as a roofline sees it: bytes per second from memory, operations per second of each kind."""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from headrace.planner import host
from headrace.program.ops import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
READ_BYTES = 256 << 20
"""Memory that a measurement takes and reads: well beyond the last-level cache."""
_FRESH_SECONDS = 3600


@dataclass(frozen=True)
class Machine:
    """What was measured of a machine, with `threads` threads at work."""

    cpu: str
    isa: str
    """Instruction set that the kernels run on."""
    threads: int
    bandwidth: float
    """Bytes per second read from memory."""
    rates: Mapping[Kind, float]
    """Operations per second (a multiply-add counts as two)."""

    def ridge(self, kind: Kind) -> float:
        """Operations per byte above which arithmetic, not memory, bounds the time (Williams et al. 2009)."""
        return self.rates[kind] / self.bandwidth


def measure(threads: int = 0) -> Machine:
    """Measure this machine, in about half a second, and remember the result. `threads` 0: as many as the process may use."""
    from headrace import _native

    threads = threads or host.usable_cores()
    bandwidth = _native.read_bandwidth(threads, READ_BYTES)
    rates: dict[Kind, float] = {kind: _native.dot_rate(kind, threads) for kind in KINDS}
    machine = Machine(host.cpu_name(), _native.isa(), threads, bandwidth, rates)
    _remember(machine)
    return machine


def remembered(threads: int = 0, max_age: float = math.inf) -> Machine | None:
    """What `measure` last found on this processor with as many threads, if that is not more than `max_age` seconds ago."""
    from headrace import _native

    threads = threads or host.usable_cores()
    cpu, isa = host.cpu_name(), _native.isa()
    found = _load().get(_key(cpu, isa, threads))
    if not isinstance(found, dict):
        return None
    try:
        rates: dict[Kind, float] = {kind: float(found["rates"][kind]) for kind in KINDS}
        machine, age = Machine(cpu, isa, threads, float(found["bandwidth"]), rates), time.time() - float(found["time"])
    except (KeyError, TypeError, ValueError):
        return None  # written by another version: measure again
    return machine if age <= max_age else None


def this_machine(threads: int = 0) -> Machine:
    """What was measured within the last hour, or a new measurement: on a shared machine, bandwidth moves with the neighbours."""
    return remembered(threads, _FRESH_SECONDS) or measure(threads)


def _key(cpu: str, isa: str, threads: int) -> str:
    return f"{cpu} / {isa} / {threads}"


def _cache_file() -> Path:
    from platformdirs import user_cache_path

    return Path(os.environ.get("HEADRACE_CACHE") or user_cache_path("headrace")) / "machine.json"


def _load() -> dict[str, object]:
    try:
        found = json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(machine: Machine) -> None:
    """Best effort: a cache that cannot be written only costs the next measurement."""
    entry = {"bandwidth": machine.bandwidth, "rates": dict(machine.rates), "time": time.time()}
    known = _load() | {_key(machine.cpu, machine.isa, machine.threads): entry}
    file = _cache_file()
    new = file.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(known, indent=1))
        new.replace(file)
