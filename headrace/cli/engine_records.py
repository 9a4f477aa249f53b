"""Reads the records that running engines write while a process watches them.

`engine/publish.py` writes the records. Any program of the user may have written a file in the
folder, so every value is checked.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

from headrace.engine.publish import (
    FRESH,
    INTERVAL,
    MAX_BLOCKS,
    MAX_SEQUENCES,
    VERSION,
    WATCH,
    folder,
    is_private,
    read_file,
)
from headrace.errors import HeadraceError, RequestError
from headrace.outputs import DraftStats
from headrace.stats import (
    STEP_KINDS,
    BlockMap,
    GroupMap,
    Holding,
    KvStats,
    SequenceStats,
    Stats,
    StepTotals,
)
from headrace.whole_file import UNFINISHED

Record = dict[str, Any]
"""State of an engine: a `Stats` and a `BlockMap`; times are seconds since the epoch."""

_MAX_RECORD_BYTES = 16 << 20
_MAX_WAIT = 2 * FRESH
_REDRAW_SECONDS = 0.5
_STALE_SECONDS = 10.0
"""Age in seconds after which a dead process's record is deleted."""
_RATIOS = (
    "kv_bytes",
    "kv_bytes_used",
    "occupancy",
    "waste",
    "fragmentation",
    "rows_mean",
    "prefix_hit_rate",
    "acceptance_rate",
)


class EngineWatcher:
    """Watches the engines of this user, or of one process, if read about once a second.

    Raises RequestError if other users can access the records' folder.
    """

    def __init__(self, pid: int | None = None, *, with_map: bool = False) -> None:
        self._pid = pid
        self._text = "map" if with_map else ""
        self._folder = folder()
        self.now = time.time
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self._folder}: {error.strerror}; set HEADRACE_STATS to another folder"
            ) from None
        if not is_private(self._folder):
            raise RequestError(
                f"{self._folder} is open to other users; chmod 700 it, or set HEADRACE_STATS to "
                "another folder"
            )
        self._started = self.now()
        self._touch()

    def sleep(self) -> None:
        time.sleep(_REDRAW_SECONDS)

    def wait(self) -> list[Record]:
        """Wait for the records of the first second, or for the first later record."""
        deadline = self.now() + _MAX_WAIT
        while self.now() < deadline:
            time.sleep(INTERVAL / 2)
            fresh = [record for record in self.read() if record["time"] >= self._started]
            if fresh and self.now() >= self._started + 4 * INTERVAL:
                return fresh
        return self.read()

    def read(self) -> list[Record]:
        """Read all records, the busiest engine first; deletes the records of dead processes."""
        self._touch()
        # A process that was killed while it wrote leaves a hidden file.
        for file in self._folder.glob(f".*{UNFINISHED}"):
            with suppress(OSError):
                if self.now() - file.stat().st_mtime > _STALE_SECONDS:
                    file.unlink()

        records = []
        for file in sorted(self._folder.glob("*.json")):
            record = self._read_record(file)
            if record and self._pid in (None, record["pid"]):
                records.append(record)
        return sorted(
            records, key=lambda record: (-record["time"] // FRESH, -record["stats"].rows_per_second)
        )

    def _touch(self) -> None:
        """Mark the folder as watched. Engines read the file meanwhile, so it is written in
        place.
        """
        try:
            (self._folder / WATCH).write_text(self._text)
        except OSError as error:
            raise HeadraceError(
                f"{self._folder}: {error.strerror}; set HEADRACE_STATS to another folder"
            ) from None

    def _read_record(self, file: Path) -> Record | None:
        try:
            is_stale = self.now() - file.stat().st_mtime > _STALE_SECONDS
            if is_stale and not _is_alive(int(file.stem.partition("-")[0])):
                file.unlink()
                return None
            return parse_record(read_file(file, _MAX_RECORD_BYTES))
        except (OSError, ValueError):
            return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def record_facts(record: Record) -> Record:
    """The record as JSON, with ratios of its counts."""
    stats: Stats = record["stats"]
    ratios = {name: getattr(stats, name) for name in _RATIOS}
    kv = [group._asdict() for group in stats.kv]
    steps = {kind: getattr(stats, kind)._asdict() for kind in STEP_KINDS}
    return record | {"stats": stats._asdict() | {"kv": kv} | steps | ratios}


_MAX_NUMBER = 2**63
_POSITIVE = ("block_size", "block_bytes", "blocks_total", "num_blocks")
_SIGNED = ("seconds_saved",)
_FIELDS = {
    "version": int,
    "pid": int,
    "model": str,
    "path": str,
    "started": float,
    "time": float,
    "sequences_left_off": int,
}
_CONFIG_NUMBERS = {"max_num_seqs": int, "max_num_batched_tokens": int, "max_model_len": int}


def parse_record(data: bytes) -> Record:
    """Parse and check a record. Raises ValueError."""
    try:
        values = json.loads(data)
    except RecursionError:
        raise ValueError("the record is nested too deeply") from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ValueError("not a record of this version")
    record: Record = {
        name: _checked(name, kind, values.get(name)) for name, kind in _FIELDS.items()
    }
    record["config"] = _parse_config(values.get("config"))
    record["stats"] = _parse_stats(values.get("stats"))
    record["history"] = [
        _checked("history", float, value) for value in _as_list(values.get("history"))
    ]
    record["seqs"] = [
        _parse_tuple(SequenceStats, line)._asdict()
        for line in _as_list(values.get("seqs"))[:MAX_SEQUENCES]
    ]
    if "map" in values:
        record["map"] = _parse_block_map(values["map"])
    return record


def _parse_config(values: object) -> Record:
    config = _as_dict("config", values)
    numbers = {
        name: _checked(name, kind, config.get(name)) for name, kind in _CONFIG_NUMBERS.items()
    }
    return config | numbers


def _parse_stats(values: object) -> Stats:
    fields = _as_dict("stats", values)
    kv = [_parse_tuple(KvStats, group) for group in _as_list(fields.get("kv"))]
    if not kv:
        raise ValueError("kv is empty")
    parsed = {
        "kv": kv,
        "drafts": {
            name: _parse_tuple(DraftStats, stats)
            for name, stats in _as_dict("drafts", fields.get("drafts")).items()
        },
        "expert_loads": [
            [_checked("expert_loads", int, load) for load in _as_list(loads)]
            for loads in _as_list(fields.get("expert_loads", []))
        ],
        **{kind: _parse_tuple(StepTotals, fields[kind]) for kind in STEP_KINDS if kind in fields},
        "adapters": {
            str(name): _checked("adapters", int, count)
            for name, count in _as_dict("adapters", fields.get("adapters", {})).items()
        },
    }
    stats: Stats = _parse_tuple(Stats, fields | parsed)
    return stats


def _parse_block_map(values: object) -> BlockMap:
    block_map = _fields_of(BlockMap, values)
    groups = []
    for group_values in _as_list(block_map["groups"]):
        group = _fields_of(GroupMap, group_values)
        num_blocks = _checked("num_blocks", int, group["num_blocks"])
        if num_blocks > MAX_BLOCKS:
            raise ValueError(f"{num_blocks:,} blocks are too many")
        holdings = []
        for holding_values in _as_list(group["holdings"]):
            holding = _fields_of(Holding, holding_values)
            # -1 is a block that attention no longer needs.
            blocks = _parse_blocks(holding["blocks"], -1, num_blocks)
            holdings.append(_parse_tuple(Holding, holding | {"blocks": blocks}))
        cached = _parse_blocks(group.get("cached", []), 0, num_blocks)
        groups.append(_parse_tuple(GroupMap, group | {"holdings": holdings, "cached": cached}))
    return BlockMap(_checked("block_size", int, block_map["block_size"]), groups)


def _parse_blocks(values: object, minimum: int, end: int) -> list[int]:
    blocks = _as_list(values)
    if not all(type(block) is int and minimum <= block < end for block in blocks):
        raise ValueError("a block is outside the pool")
    return blocks


def _parse_tuple(cls: Any, values: object) -> Any:
    fields = _fields_of(cls, values)
    return cls(
        **{
            name: _checked(name, kind, fields[name])
            for name, kind in get_type_hints(cls).items()
            if name in fields
        }
    )


def _fields_of(cls: Any, values: object) -> dict[str, Any]:
    if isinstance(values, list | tuple) and len(values) <= len(cls._fields):
        values = dict(zip(cls._fields, values, strict=False))
    required = set(cls._fields) - set(cls._field_defaults)
    if not isinstance(values, Mapping) or not required <= values.keys():
        raise ValueError(f"not a {cls.__name__}")
    return {name: values[name] for name in cls._fields if name in values}


def _checked(name: str, kind: Any, value: Any) -> Any:
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{name} is not a text")
    if kind in (int, float):
        minimum = 1 if name in _POSITIVE else -_MAX_NUMBER if name in _SIGNED else 0
        # The comparison is false for NaN.
        if type(value) not in (int, kind) or not minimum <= value <= _MAX_NUMBER:
            raise ValueError(f"{name} is not a number from {minimum}")
    return value


def _as_dict(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _as_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value
