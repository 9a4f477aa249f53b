"""Loads and expected waits of all replicas, as arrays with one row per replica."""

from dataclasses import fields
from math import exp

import numpy as np
from numpy.typing import NDArray

from headrace.scaleout.replica_speed import ReplicaSpeed

Floats = NDArray[np.float64]

_SHARE_POWER = 3
"""Exponent of a replica's relative load, which multiplies its expected time."""
_MEMORY_REQUESTS = 64
"""Requests per replica over which loads decay to 1 / e."""
_GRACE_REQUESTS = 4
"""Mean requests by which loads may differ without a penalty."""
_MAX_DOUBT = 1024.0
_EPSILON = 1e-9
_OUTPUT_RATE = 0.02

_COLUMNS = np.dtype(
    [
        ("is_present", bool),
        ("step_seconds", float),
        ("row_seconds", float),
        ("sequence_seconds", float),
        ("chunk_size", float),
        ("max_num_seqs", float),
        ("queued", float),  # uncached prompt rows of requests without a first token
        ("running", float),  # requests that have not ended
        ("queued_elsewhere", float),  # the replica's reported rows minus `queued`
        ("running_elsewhere", float),
        ("load", float),  # decayed sum of queued row-seconds
        ("doubt", float),  # factor on the expected time, after failures
    ]
)


class ReplicaLoads:
    def __init__(self) -> None:
        self._table = np.zeros(0, _COLUMNS)
        self._mean_output_length = 1.0
        self._num_routed = 0.0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def is_present(self) -> NDArray[np.bool_]:  # [replicas]
        present: NDArray[np.bool_] = self._table["is_present"]
        return present

    def queued(self, replica: int) -> int:
        return int(self._table["queued"][replica])

    def running(self, replica: int) -> int:
        return int(self._table["running"][replica])

    def add(self, speed: ReplicaSpeed) -> int:
        """Add an idle replica with the mean load, so that it attracts no burst; returns its
        number.
        """
        present = self.is_present
        load = float(self._table["load"][present].mean()) if present.any() else 0.0
        free = np.flatnonzero(~present)
        if len(free):
            number = int(free[0])
        else:
            number = len(present)
            self._table = np.concatenate([self._table, np.zeros(1, _COLUMNS)])
        self._table[number] = np.zeros(1, _COLUMNS)[0]
        self._table["is_present"][number] = True
        self._table["load"][number] = load
        self._table["doubt"][number] = 1
        self.set_speed(number, speed)
        return number

    def set_speed(self, replica: int, speed: ReplicaSpeed) -> None:
        for field in fields(speed):
            self._table[field.name][replica] = getattr(speed, field.name)

    def remove(self, replica: int) -> None:
        self._table[replica] = np.zeros(1, _COLUMNS)[0]

    def first_token_seconds(self, rows: NDArray[np.int64]) -> Floats:  # [replicas]
        """Expected seconds to the first token, given `rows` uncached rows per replica.

        If all sequence slots are used, some must end first.
        """
        table = self._table
        running = np.maximum(table["running"] + table["running_elsewhere"], 0)
        all_rows = rows + np.maximum(table["queued"] + table["queued_elsewhere"], 0)
        # The maximum avoids a division by 0 in the rows of absent replicas.
        slots = np.maximum(table["max_num_seqs"], 1)
        chunk_size = np.maximum(table["chunk_size"], 1)
        step = table["step_seconds"] + table["sequence_seconds"] * np.minimum(running, slots)
        slot_wait = np.maximum(running + 1 - slots, 0) / slots * self._mean_output_length
        steps = np.maximum(all_rows / chunk_size, 1) + slot_wait
        seconds: Floats = steps * step + all_rows * table["row_seconds"]
        return seconds

    def weighted(self, seconds: Floats) -> Floats:  # [replicas]
        table = self._table
        loads = table["load"][self.is_present]
        grace = _GRACE_REQUESTS * loads.sum() / max(self._num_routed, 1)
        relative_load = (table["load"] + grace) / max(loads.mean() + grace, _EPSILON)
        penalty = np.maximum(relative_load, 1) ** _SHARE_POWER
        weighted: Floats = seconds * penalty * table["doubt"]
        return weighted

    def least_loaded(self, candidates: NDArray[np.intp], start: int) -> int:
        """Ties go to the next from `start` on."""
        loads = self._table["load"][candidates]
        lowest = candidates[loads == loads.min()]
        return int(lowest[np.searchsorted(lowest, start) % len(lowest)])

    def step_seconds(self, replica: int) -> float:
        return float(self._table["step_seconds"][replica])

    def begin(self, replica: int, rows: int, seconds: float) -> None:
        table = self._table
        decay = exp(-1 / (_MEMORY_REQUESTS * max(1, int(self.is_present.sum()))))
        self._num_routed = self._num_routed * decay + 1
        table["load"] *= decay
        table["doubt"] = 1 + (table["doubt"] - 1) * decay
        table["queued"][replica] += rows
        table["running"][replica] += 1
        compute_seconds = (
            rows / table["chunk_size"][replica] * table["step_seconds"][replica]
            + rows * table["row_seconds"][replica]
        )
        table["load"][replica] += rows * max(seconds - compute_seconds / 2, compute_seconds / 2)

    def first_token(self, replica: int, rows: int) -> None:
        self._subtract("queued", replica, rows)

    def end(self, replica: int, output_length: int | None) -> None:
        self._subtract("running", replica, 1)
        if output_length is not None:
            error = output_length - self._mean_output_length
            self._mean_output_length += _OUTPUT_RATE * error

    def clear_doubt(self, replica: int) -> None:
        self._table["doubt"][replica] = 1

    def raise_doubt(self, replica: int) -> None:
        """Double the doubt: a replica that fails fast looks idle."""
        self._table["doubt"][replica] = min(2 * self._table["doubt"][replica], _MAX_DOUBT)

    def observe(self, replica: int, queued: int, running: int) -> None:
        table = self._table
        table["queued_elsewhere"][replica] = queued - table["queued"][replica]
        table["running_elsewhere"][replica] = running - table["running"][replica]

    def _subtract(self, column: str, replica: int, count: int) -> None:
        own, elsewhere = self._table[column], self._table[f"{column}_elsewhere"]
        own[replica] -= count
        if elsewhere[replica] < 0:
            elsewhere[replica] = min(0, elsewhere[replica] + count)
