"""The machine, or its GPU, as a roofline sees it: bytes per second from memory, operations per
second of each kind.
"""

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
    """What was measured of a machine, with `threads` threads at work, or of its GPU."""

    cpu: str
    """The name of the processor, or of the GPU."""
    isa: str
    """Instruction set that the kernels run on."""
    threads: int
    """Of a GPU its multiprocessors."""
    bandwidth: float
    """Bytes per second read from memory."""
    rates: Mapping[Kind, float]
    """Operations per second (a multiply-add counts as two)."""

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.isa.startswith("sm_")

    @property
    def at_work(self) -> str:
        """What works at the same time: `8 threads`."""
        return (
            f"{self.threads:,} "
            f"{'multiprocessor' if self.is_gpu else 'thread'}{'s' * (self.threads != 1)}"
        )

    def ridge(self, kind: Kind) -> float:
        """Operations per byte above which arithmetic, not memory, bounds the time (Williams et al.
        2009).
        """
        return self.rates[kind] / self.bandwidth


@frozen
class _Reading:
    """What one measurement found."""

    time: float
    """Seconds since the epoch."""
    bandwidth: float
    rates: Mapping[Kind, float]


class _Processor(NamedTuple):
    """What is measured."""

    name: str
    isa: str
    threads: int
    gpu: bool = False

    @property
    def key(self) -> str:
        """Under which its readings are kept."""
        return f"{self.name} / {self.isa} / {self.threads}"


def measure(threads: int = 0, backend: str = "cpu") -> Machine:
    """Measure what a backend runs on as it is now, in about half a second, and remember the result.

    `threads` 0: as many as the process may use. Kernels for a GPU that are interpreted run on the
    processor.
    """
    return _measured(_processor(threads, backend))


def remembered(threads: int = 0, backend: str = "cpu") -> Machine | None:
    """The best that was measured of this processor with as many threads in the last day; the newest
    measurement where all are older.

    A busy machine is measured too slow, and none too fast: of several measurements the highest is
    the nearest to what it can do.
    """
    processor = _processor(threads, backend)
    return _best(_known(processor), processor)


def this_machine(threads: int = 0, backend: str = "cpu") -> Machine:
    """The best that was measured in the last day, after one more measurement where that may be too
    low.
    """
    processor = _processor(threads, backend)
    known = _known(processor)
    best = _best(known, processor) if _is_settled(known) else None
    if best is None:
        measured = measure(threads, backend)
        best = (
            remembered(threads, backend) or measured
        )  # nothing is remembered where the cache cannot be written
    return best


def _processor(threads: int, backend: str) -> _Processor:
    """What a backend runs on."""
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


def _best(readings: list[_Reading], processor: _Processor) -> Machine | None:
    """The highest of each figure."""
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
    """Whether one of the readings is fresh, and the two highest bandwidths agree, or many fresh
    ones never did.
    """
    num_fresh = sum(time.time() - reading.time <= _FRESH_SECONDS for reading in readings)
    second, best = sorted([0.0, 0.0, *(reading.bandwidth for reading in readings)])[-2:]
    return num_fresh >= _MOST_FRESH or (num_fresh > 0 and second >= _AGREEMENT * best)


def _known(processor: _Processor) -> list[_Reading]:
    """What is remembered of a processor."""
    return _recent(_readings(_load().get(processor.key)))


def _recent(readings: list[_Reading]) -> list[_Reading]:
    """Those of the last day; the newest where there are none."""
    now = time.time()
    return [reading for reading in readings if 0 <= now - reading.time <= _DAY] or readings[-1:]


def _readings(entry: object) -> list[_Reading]:
    """The readings of an entry of the cache, the oldest first; none of one that another version
    wrote.
    """
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
        r
        for r in found
        if all(0 < figure < math.inf for figure in (r.time, r.bandwidth, *r.rates.values()))
    ]


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
