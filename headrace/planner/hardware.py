"""Measured bandwidth and arithmetic, for the roofline."""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, get_args

from headrace.backend_traits import traits_of
from headrace.planner import gpu, host
from headrace.program.op import Kind
from headrace.record import frozen
from headrace.whole_file import replace_file

KINDS: tuple[Kind, ...] = get_args(Kind)
READ_BYTES = 256 << 20
"""Bytes that a measurement reads: far more than the last-level cache."""
_FRESH_SECONDS = 3600
"""Age of a stale measurement."""
_MAX_FRESH = 5
"""Fresh readings that suffice even if they differ."""
_DAY = 24 * 3600
_MAX_READINGS = 200
_AGREEMENT = 0.9
"""Share of the higher bandwidth that the lower must reach."""


@frozen
class Machine:
    """Measured rates of a machine or of its GPU."""

    cpu: str
    isa: str
    threads: int
    """Threads, or multiprocessors of a GPU."""
    bandwidth: float
    """Bytes/s from memory."""
    rates: Mapping[Kind, float]
    """Operations/s; a multiply-add counts as two."""

    @property
    def is_gpu(self) -> bool:
        return self.isa.startswith("sm_")

    @property
    def at_work(self) -> str:
        unit = "multiprocessor" if self.is_gpu else "thread"
        return f"{self.threads:,} {unit}" + "s" * (self.threads != 1)

    def ridge(self, kind: Kind) -> float:
        """Operations per byte above which arithmetic limits the time (Williams et al. 2009)."""
        return self.rates[kind] / self.bandwidth


@frozen
class _Reading:
    time: float
    """Seconds since the epoch."""
    bandwidth: float
    rates: Mapping[Kind, float]


class _Processor(NamedTuple):
    name: str
    isa: str
    threads: int
    gpu: bool = False

    @property
    def key(self) -> str:
        return f"{self.name} / {self.isa} / {self.threads}"


def measure(threads: int = 0, backend: str = "cpu") -> Machine:
    """Measure a backend's processor or GPU in half a second, and store the result.

    `threads` 0 uses all usable cores.
    """
    return _measured(_processor(threads, backend))


def cached_machine(threads: int = 0, backend: str = "cpu") -> Machine | None:
    """The highest stored rates of the last day, or the newest measurement.

    A busy machine is measured too slow and none too fast.
    """
    processor = _processor(threads, backend)
    return _best(_known(processor), processor)


def this_machine(threads: int = 0, backend: str = "cpu") -> Machine:
    """The highest rates of the last day, measured again if they may be too low."""
    processor = _processor(threads, backend)
    known = _known(processor)
    best = _best(known, processor) if _is_settled(known) else None
    if best is None:
        measured = measure(threads, backend)
        # If the cache cannot be written, nothing is stored.
        best = cached_machine(threads, backend) or measured
    return best


def _processor(threads: int, backend: str) -> _Processor:
    from headrace import _native

    if traits_of(backend).on_gpu and not gpu.interprets():
        found, _ = gpu.find_gpu()
        if found:
            return _Processor(found.name, found.isa, found.multiprocessors, gpu=True)
    return _Processor(host.cpu_name(), _native.isa(), threads or host.usable_cores())


def _measured(processor: _Processor) -> Machine:
    from headrace import _native

    rates: dict[Kind, float]
    if processor.gpu:
        from headrace.backend.cuda.measure import rate, read_bandwidth

        bandwidth, rates = read_bandwidth(), {kind: rate(kind) for kind in KINDS}
    else:
        bandwidth = _native.read_bandwidth(processor.threads, READ_BYTES)
        rates = {kind: _native.dot_rate(kind, processor.threads) for kind in KINDS}
    _remember(processor.key, _Reading(time.time(), bandwidth, rates))
    return Machine(
        cpu=processor.name,
        isa=processor.isa,
        threads=processor.threads,
        bandwidth=bandwidth,
        rates=rates,
    )


def bandwidth_now(threads: int = 0) -> float:
    """One quick reading of the bytes/s from memory, which is not stored."""
    from headrace import _native

    return _native.read_bandwidth(threads or host.usable_cores(), READ_BYTES // 2)


def _best(readings: list[_Reading], processor: _Processor) -> Machine | None:
    if not readings:
        return None
    rates: dict[Kind, float] = {
        kind: max(reading.rates[kind] for reading in readings) for kind in KINDS
    }
    return Machine(
        cpu=processor.name,
        isa=processor.isa,
        threads=processor.threads,
        bandwidth=max(reading.bandwidth for reading in readings),
        rates=rates,
    )


def _is_settled(readings: list[_Reading]) -> bool:
    num_fresh = sum(time.time() - reading.time <= _FRESH_SECONDS for reading in readings)
    second, best = sorted([0.0, 0.0, *(reading.bandwidth for reading in readings)])[-2:]
    return num_fresh >= _MAX_FRESH or (num_fresh > 0 and second >= _AGREEMENT * best)


def _known(processor: _Processor) -> list[_Reading]:
    return _recent(_readings(_load().get(processor.key)))


def _recent(readings: list[_Reading]) -> list[_Reading]:
    now = time.time()
    return [reading for reading in readings if 0 <= now - reading.time <= _DAY] or readings[-1:]


def _readings(entry: object) -> list[_Reading]:
    try:
        found = [
            _Reading(
                float(r["time"]), float(r["bandwidth"]), {k: float(r["rates"][k]) for k in KINDS}
            )
            for r in entry  # type: ignore[attr-defined]
        ]
    except (KeyError, TypeError, ValueError):
        return []
    return [
        reading
        for reading in found
        if all(
            0 < figure < math.inf
            for figure in (reading.time, reading.bandwidth, *reading.rates.values())
        )
    ]


def processor_key(threads: int = 0, backend: str = "cpu") -> str:
    """Name of this processor or GPU, with its instruction set and threads, for stored figures."""
    return _processor(threads, backend).key


def cache_file(name: str) -> Path:
    """A file of stored measurements."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("HEADRACE_CACHE") or user_cache_path("headrace")) / name


def _cache_file() -> Path:
    return cache_file("machine.json")


def _load() -> dict[str, object]:
    try:
        found = json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(key: str, reading: _Reading) -> None:
    found = _load()
    readings = [*_readings(found.get(key)), reading]
    recent = _recent(readings)[-_MAX_READINGS:]
    entries = found | {key: [asdict(reading) for reading in recent]}
    file = _cache_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(entries, indent=1))
