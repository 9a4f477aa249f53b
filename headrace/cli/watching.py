"""The reader's side of the records that engines write while they are looked at (`engine/publish.py`
is the writer's).
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from headrace.cli.record import Record, parse_record
from headrace.engine.publish import FRESH, INTERVAL, WATCH, folder, is_private, read_file
from headrace.errors import HeadraceError, RequestError
from headrace.stats import Stats

_MOST_BYTES = 16 << 20
_PATIENCE = 2 * FRESH
_REDRAW = 0.5
_STALE = 10.0
"""Seconds after which the record of a process that is not there is taken away."""

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
"""Properties of `Stats` that JSON has beside its fields."""


class Watch:
    """A look at the engines of this user, or of one process, that lasts as long as `read` is called
    every second or so.

    Raises RequestError where the folder of the records is not ours alone.
    """

    def __init__(self, pid: int | None = None, *, with_map: bool = False) -> None:
        self._pid = pid
        self._words = "map" if with_map else ""
        self._folder = folder()
        self.now = time.time
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self._folder}: {error.strerror}; name another folder in HEADRACE_STATS"
            ) from None
        if not is_private(self._folder):
            raise RequestError(
                f"{self._folder} is open to others: chmod 700 it, or name another folder "
                "in HEADRACE_STATS"
            )
        self._begun = self.now()
        self._look()

    def sleep(self) -> None:
        """Until the next look is worth it."""
        time.sleep(_REDRAW)

    def wait(self) -> list[Record]:
        """What engines say after this look has begun: all that answer within a second, or the first
        one to answer later.
        """
        give_up = self.now() + _PATIENCE
        while self.now() < give_up:
            time.sleep(INTERVAL / 2)
            fresh = [record for record in self.read() if record["time"] >= self._begun]
            if fresh and self.now() >= self._begun + 4 * INTERVAL:
                return fresh
        return self.read()

    def read(self) -> list[Record]:
        """The records that are there, the busiest engine first; those of dead processes are taken
        away.
        """
        self._look()
        records = []
        for file in self._folder.glob(".*.new"):  # of a process that was killed while it wrote
            with suppress(OSError):
                if self.now() - file.stat().st_mtime > _STALE:
                    file.unlink()
        for file in sorted(self._folder.glob("*.json")):
            record = self._record(file)
            if record and self._pid in (None, record["pid"]):
                records.append(record)
        return sorted(
            records, key=lambda record: (-record["time"] // FRESH, -record["stats"].rows_per_second)
        )

    def _look(self) -> None:
        """Keep the look fresh. Written in place: engines read it while they run."""
        try:
            (self._folder / WATCH).write_text(self._words)
        except OSError as error:
            raise HeadraceError(
                f"{self._folder}: {error.strerror}; name another folder in HEADRACE_STATS"
            ) from None

    def _record(self, file: Path) -> Record | None:
        try:
            if self.now() - file.stat().st_mtime > _STALE and not _is_alive(
                int(file.stem.partition("-")[0])
            ):
                file.unlink()
                return None
            return parse_record(read_file(file, _MOST_BYTES))
        except (OSError, ValueError):
            return None  # gone meanwhile, written by another version, or no record at all


def facts(record: Record) -> Record:
    """The record for JSON, with the ratios that follow from its counts."""
    stats: Stats = record["stats"]
    ratios = {name: getattr(stats, name) for name in _RATIOS}
    return record | {
        "stats": stats._asdict() | {"kv": [group._asdict() for group in stats.kv]} | ratios
    }


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
