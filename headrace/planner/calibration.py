"""Stored calibrations: the speed of kernels and the memory of a process on this machine."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headrace.planner import hardware, host
from headrace.planner.memory import ProcessMemory
from headrace.planner.reach import Reach, Reaches, parse_reaches
from headrace.record import frozen
from headrace.whole_file import replace_file

_FILE = "calibration.json"


@frozen
class Calibration:
    """Measurements of one machine, instruction set, number of threads, and build of the kernels."""

    reaches: Reaches
    process: ProcessMemory


def stored_calibration(threads: int = 0) -> Calibration | None:
    """The calibration of this machine and these kernels; None before the first, and for a file that
    cannot be read.
    """
    entry = _load().get(_key(threads))
    if not isinstance(entry, Mapping):
        return None
    try:
        process = ProcessMemory(**entry["process"])
        return Calibration(parse_reaches(entry), process)
    except (KeyError, TypeError, ValueError):
        return None


def store_calibration(calibration: Calibration, threads: int = 0) -> bool:
    """Store a calibration in place of the last one; False if the folder cannot be written."""
    entries = {**_load(), _key(threads): calibration_facts(calibration)}
    file = hardware.cache_file(_FILE)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(entries, indent=1))
        return True
    return False


def calibration_facts(calibration: Calibration) -> dict[str, Any]:
    """A calibration as JSON, in the form of `reach.toml`."""
    reaches = calibration.reaches
    return {
        "source": reaches.source,
        "block_rows": reaches.block_rows,
        "host": asdict(reaches.host),
        "process": asdict(calibration.process),
        "classes": {
            part: {f"{bits:g}": _reach_facts(reach) for bits, reach in by_bits.items()}
            for part, by_bits in reaches.table.items()
        },
    }


def _reach_facts(reach: Reach) -> dict[str, float]:
    """The fields that are not the default: JSON has no infinity."""
    default = Reach(seconds=0.0, bandwidth=0.0, rate=0.0)
    required = ("seconds", "bandwidth", "rate")
    return {
        name: value
        for name, value in asdict(reach).items()
        if name in required or value != getattr(default, name)
    }


def _key(threads: int) -> str:
    return f"{hardware.processor_key(threads)} / kernels {host.kernels_checksum():08x}"


def _load() -> dict[str, object]:
    try:
        found = json.loads(hardware.cache_file(_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
