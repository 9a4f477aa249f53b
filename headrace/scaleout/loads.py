"""How busy replicas are, and how long the next request would wait there: a table with a row for
each, so a thousand are one sum.
"""

from dataclasses import fields
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.record import frozen

Floats = NDArray[np.float64]

_SHARE_POWER = 3
"""Power of a replica's load to the mean load, by which its expected time counts more."""
_MEMORY = 64
"""Requests for each replica over which loads and doubts are forgotten to 1 / e."""
_GRACE = 4
"""Requests of the mean kind by which loads may differ next to freely: what a few have cost says
little.
"""
_MOST_DOUBT = 1024.0
_TINY = 1e-9
_OUTPUT_RATE = 0.02
"""Share of the error that moves the mean length of outputs."""

_COLUMNS = np.dtype(
    [
        ("is_there", bool),
        ("step_seconds", float),
        ("row_seconds", float),
        ("sequence_seconds", float),
        ("chunk", float),
        ("max_num_seqs", float),
        ("queued", float),  # prompt rows that were not cached, of requests without a first token
        ("running", float),  # requests that have not ended
        ("queued_elsewhere", float),  # what the replica's own report had more, or less
        ("running_elsewhere", float),
        ("load", float),  # queued row-seconds, over the last `_MEMORY` requests or so
        ("doubt", float),  # what its time is multiplied by, after failures
    ]
)


@frozen
class StepCost:
    """What a step takes: `step_seconds` + `row_seconds` x prompt rows + `sequence_seconds` x
    decoding sequences.

    Raises RequestError where that could not be.
    """

    step_seconds: float
    """Of a step with next to nothing in it: the weights are read once."""
    row_seconds: float
    """More for each prompt row."""
    sequence_seconds: float = 0.0
    """More for each sequence that decodes: its row, and reading its context."""
    chunk: int = 512
    """Most prompt rows in a step."""
    max_num_seqs: int = 64
    """Most sequences that run; others wait until one of them ends."""

    def __post_init__(self) -> None:
        seconds = self.step_seconds, self.row_seconds, self.sequence_seconds
        if not (
            self.step_seconds > 0
            and all(0 <= each < inf for each in seconds)
            and self.chunk >= 1
            and self.max_num_seqs >= 1
        ):
            raise RequestError(
                f"a step takes some time, and has a row and a sequence at least: {self}"
            )


class Loads:
    """Queued rows and running sequences of replicas, which are named by small numbers."""

    def __init__(self) -> None:
        self._table = np.zeros(0, _COLUMNS)
        self._mean_output = 1.0
        self._num_routed = 0.0
        """Requests, forgotten as loads are."""

    def __len__(self) -> int:
        """Numbers that have been used."""
        return len(self._table)

    @property
    def is_there(self) -> NDArray[np.bool_]:  # [replicas]
        """Whether a number stands for a replica now."""
        there: NDArray[np.bool_] = self._table["is_there"]
        return there

    def queued(self, replica: int) -> int:
        """Prompt rows that were routed to a replica and have no first token."""
        return int(self._table["queued"][replica])

    def running(self, replica: int) -> int:
        """Requests that were routed to a replica and have not ended."""
        return int(self._table["running"][replica])

    def join(self, cost: StepCost) -> int:
        """A replica that has nothing to do; returns its number. Its load is the mean, so that it is
        not flooded to make up for others.
        """
        there = self.is_there
        load = float(self._table["load"][there].mean()) if there.any() else 0.0
        free = np.flatnonzero(~there)
        number = int(free[0]) if len(free) else len(there)
        if not len(free):
            self._table = np.concatenate([self._table, np.zeros(1, _COLUMNS)])
        self._table[number] = np.zeros(1, _COLUMNS)[0]
        for column, value in (("is_there", True), ("load", load), ("doubt", 1)):
            self._table[column][number] = value
        self.set_cost(number, cost)
        return number

    def set_cost(self, replica: int, cost: StepCost) -> None:
        """What the steps of a replica cost from now on."""
        for field in fields(cost):
            self._table[field.name][replica] = getattr(cost, field.name)

    def leave(self, replica: int) -> None:
        """A replica is gone, with all that it had to do."""
        self._table[replica] = np.zeros(1, _COLUMNS)[0]

    def seconds(self, rows: NDArray[np.int64]) -> Floats:  # [replicas]
        """Expected time to the first token of a request that has so many rows to compute on each
        replica.

        All rows go in steps of `chunk` at most, each with a row of every running sequence; one step
        at least. Where as many sequences run as may, some must end first, after as many steps as an
        output has tokens in the mean.
        """
        table = self._table
        running = np.maximum(table["running"] + table["running_elsewhere"], 0)
        all_rows = rows + np.maximum(table["queued"] + table["queued_elsewhere"], 0)
        slots, chunk = (
            np.maximum(table["max_num_seqs"], 1),
            np.maximum(table["chunk"], 1),
        )  # 0 where a number stands for no replica
        step = table["step_seconds"] + table["sequence_seconds"] * np.minimum(running, slots)
        steps = (
            np.maximum(all_rows / chunk, 1)
            + np.maximum(running + 1 - slots, 0) / slots * self._mean_output
        )
        seconds: Floats = steps * step + all_rows * table["row_seconds"]
        return seconds

    def weighted(self, seconds: Floats) -> Floats:  # [replicas]
        """Expected times as they are compared: longer where a replica has had more than the mean of
        the load, or requests failed.
        """
        table = self._table
        there = table["load"][self.is_there]
        grace = _GRACE * there.sum() / max(self._num_routed, 1)
        share = (
            np.maximum((table["load"] + grace) / max(there.mean() + grace, _TINY), 1)
            ** _SHARE_POWER
        )
        weighted: Floats = seconds * share * table["doubt"]
        return weighted

    def lowest(self, among: NDArray[np.intp], first: int) -> int:
        """The one of these replicas with the lowest load; of several the next from `first` on,
        around.
        """
        loads = self._table["load"][among]
        lowest = among[loads == loads.min()]
        return int(lowest[np.searchsorted(lowest, first) % len(lowest)])

    def step(self, replica: int) -> float:
        """Seconds of a step with next to nothing in it."""
        return float(self._table["step_seconds"][replica])

    def begin(self, replica: int, rows: int, seconds: float) -> None:
        """A request with so many rows to compute, and an expected time to its first token, goes to
        a replica.
        """
        table = self._table
        fade = exp(-1 / (_MEMORY * max(1, int(self.is_there.sum()))))
        self._num_routed = self._num_routed * fade + 1
        table["load"] *= fade
        table["doubt"] = 1 + (table["doubt"] - 1) * fade
        table["queued"][replica] += rows
        table["running"][replica] += 1
        own = (
            rows / table["chunk"][replica] * table["step_seconds"][replica]
            + rows * table["row_seconds"][replica]
        )
        table["load"][replica] += rows * max(seconds - own / 2, own / 2)

    def first_token(self, replica: int, rows: int) -> None:
        """These rows of a request have been computed."""
        self._take("queued", replica, rows)

    def end(self, replica: int, output_length: int | None) -> None:
        """A request has ended, with so many tokens if that is known."""
        self._take("running", replica, 1)
        if output_length is not None:
            self._mean_output += _OUTPUT_RATE * (output_length - self._mean_output)

    def trust(self, replica: int) -> None:
        """A replica has given a first token."""
        self._table["doubt"][replica] = 1

    def doubt(self, replica: int) -> None:
        """A request failed there: one that fails fast looks idle, and must not draw all the
        others.
        """
        self._table["doubt"][replica] = min(2 * self._table["doubt"][replica], _MOST_DOUBT)

    def report(self, replica: int, queued: int, running: int) -> None:
        """What a replica itself says that it has to do, which other routers may have sent there,
        and of which it may have done a part.
        """
        table = self._table
        table["queued_elsewhere"][replica] = queued - table["queued"][replica]
        table["running_elsewhere"][replica] = running - table["running"][replica]

    def _take(self, what: str, replica: int, count: int) -> None:
        """So many less; what the replica's report had less already is not taken twice."""
        own, elsewhere = self._table[what], self._table[f"{what}_elsewhere"]
        own[replica] -= count
        if elsewhere[replica] < 0:
            elsewhere[replica] = min(0, elsewhere[replica] + count)
