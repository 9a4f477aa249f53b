"""The machine as a roofline sees it: bytes per second from memory, operations per second of each kind."""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from headrace.planner import host
from headrace.program.op import Kind
from headrace.record import frozen

KINDS: tuple[Kind, ...] = get_args(Kind)
READ_BYTES = 256 << 20
"""Memory that a measurement takes and reads: well beyond the last-level cache."""
_FRESH_SECONDS = 3600
"""Seconds after which a machine is measured once more."""
_MOST_FRESH = 5
"""Readings within that time that are enough, however much they differ."""
_DAY = 24 * 3600
"""Seconds for which a reading counts."""
_MOST_READINGS = 200
"""Readings that are kept."""
_AGREEMENT = 0.9
"""Two bandwidths agree where the lower is at least this share of the higher."""


@frozen
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


@frozen
class _Reading:
    """What one measurement found."""

    time: float
    """Seconds since the epoch."""
    bandwidth: float
    rates: Mapping[Kind, float]


def measure(threads: int = 0) -> Machine:
    """Measure this machine as it is now, in about half a second, and remember the result. `threads` 0: as many as the process may use."""
    from headrace import _native

    threads = threads or host.usable_cores()
    bandwidth = _native.read_bandwidth(threads, READ_BYTES)
    rates: dict[Kind, float] = {kind: _native.dot_rate(kind, threads) for kind in KINDS}
    machine = Machine(host.cpu_name(), _native.isa(), threads, bandwidth, rates)
    _remember(_key(threads), _Reading(time.time(), bandwidth, rates))
    return machine


def remembered(threads: int = 0) -> Machine | None:
    """The best that was measured of this processor with as many threads in the last day; the newest measurement where all are older.

    A busy machine is measured too slow, and none too fast: of several measurements the highest is the nearest to what it can do.
    """
    threads = threads or host.usable_cores()
    return _best(_known(threads), threads)


def this_machine(threads: int = 0) -> Machine:
    """The best that was measured in the last day, after one more measurement where that may be too low."""
    threads = threads or host.usable_cores()
    known = _known(threads)
    best = _best(known, threads) if _is_settled(known) else None
    if best is None:
        measured = measure(threads)
        best = remembered(threads) or measured  # nothing is remembered where the cache cannot be written
    return best


def _best(readings: list[_Reading], threads: int) -> Machine | None:
    """The highest of each figure."""
    from headrace import _native

    if not readings:
        return None
    rates: dict[Kind, float] = {kind: max(reading.rates[kind] for reading in readings) for kind in KINDS}
    return Machine(host.cpu_name(), _native.isa(), threads, max(reading.bandwidth for reading in readings), rates)


def _is_settled(readings: list[_Reading]) -> bool:
    """Whether one of the readings is fresh, and the two highest bandwidths agree, or many fresh ones never did."""
    num_fresh = sum(time.time() - reading.time <= _FRESH_SECONDS for reading in readings)
    second, best = sorted([0.0, 0.0, *(reading.bandwidth for reading in readings)])[-2:]
    return num_fresh >= _MOST_FRESH or (num_fresh > 0 and second >= _AGREEMENT * best)


def _known(threads: int) -> list[_Reading]:
    """What is remembered of this processor with so many threads."""
    return _recent(_readings(_load().get(_key(threads))))


def _recent(readings: list[_Reading]) -> list[_Reading]:
    """Those of the last day; the newest where there are none."""
    now = time.time()
    return [reading for reading in readings if 0 <= now - reading.time <= _DAY] or readings[-1:]


def _readings(entry: object) -> list[_Reading]:
    """The readings of an entry of the cache, the oldest first; none of one that another version wrote."""
    try:
        found = [_Reading(float(r["time"]), float(r["bandwidth"]), {k: float(r["rates"][k]) for k in KINDS}) for r in entry]  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        return []
    return [r for r in found if all(0 < figure < math.inf for figure in (r.time, r.bandwidth, *r.rates.values()))]


def _key(threads: int) -> str:
    from headrace import _native

    return f"{host.cpu_name()} / {_native.isa()} / {threads}"


def _cache_file() -> Path:
    from platformdirs import user_cache_path

    return Path(os.environ.get("HEADRACE_CACHE") or user_cache_path("headrace")) / "machine.json"


def _load() -> dict[str, object]:
    try:
        found = json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(key: str, reading: _Reading) -> None:
    """Best effort: a cache that cannot be written only costs the next measurement."""
    found = _load()
    readings = [*_readings(found.get(key)), reading]
    known = found | {key: [asdict(one) for one in _recent(readings)[-_MOST_READINGS:]]}
    file = _cache_file()
    new = file.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(known, indent=1))
        new.replace(file)
