"""Counters of the engine, and its rates over the last seconds."""

from bisect import bisect_right
from collections import deque
from itertools import pairwise
from typing import NamedTuple

WINDOW = 4.0
"""Length in seconds."""
HISTORY = 60
"""Length in seconds."""
_MIN_SPACING = 0.5
"""Seconds between two marks."""


class Mark(NamedTuple):
    time: float  # seconds
    tokens: int
    rows: int


class Rates(NamedTuple):
    tokens_per_second: float
    rows_per_second: float


class Meter:
    def __init__(self, now: float) -> None:
        self.finished = self.aborted = self.refused = self.failed_steps = 0
        self.rows_last = 0
        self.step_seconds = 0.0
        self.latest = Mark(now, tokens=0, rows=0)
        max_marks = round((HISTORY + WINDOW) / _MIN_SPACING) + 1
        self._marks = deque([self.latest], maxlen=max_marks)

    def record(
        self, started: float, ended: float, num_tokens: int, total_rows: int, num_steps: int
    ) -> None:
        """Record `num_steps` steps that sampled `num_tokens` tokens. `total_rows` counts from the
        start.
        """
        before = self.latest
        if started - self._marks[-1].time >= _MIN_SPACING:
            self._marks.append(before._replace(time=started))
        self.rows_last = (total_rows - before.rows) // num_steps
        self.step_seconds = (ended - started) / num_steps
        self.latest = Mark(ended, tokens=before.tokens + num_tokens, rows=total_rows)

    def rates(self, now: float) -> Rates:
        since = max(now - WINDOW, self._marks[0].time)
        seconds = now - since
        if seconds <= 0:
            return Rates(0.0, 0.0)
        tokens, rows = self._counts_at(since)
        return Rates(
            tokens_per_second=(self.latest.tokens - tokens) / seconds,
            rows_per_second=(self.latest.rows - rows) / seconds,
        )

    def history(self, now: float) -> list[float]:
        """Return the tokens per second in each of the last `HISTORY` seconds, oldest first."""
        counts = [self._counts_at(now - second)[0] for second in range(HISTORY, -1, -1)]
        return [round(after - before, 1) for before, after in pairwise(counts)]

    def _counts_at(self, time: float) -> tuple[float, float]:
        marks = [*self._marks, self.latest]
        after = bisect_right(marks, time, key=lambda mark: mark.time)
        if after == 0:
            return marks[0].tokens, marks[0].rows
        if after == len(marks):
            return self.latest.tokens, self.latest.rows
        a, b = marks[after - 1], marks[after]
        share = (time - a.time) / (b.time - a.time)
        return a.tokens + share * (b.tokens - a.tokens), a.rows + share * (b.rows - a.rows)
