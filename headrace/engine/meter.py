"""Counters of the engine, and its rates over the last seconds: a few additions in each step."""

from bisect import bisect_right
from collections import deque
from itertools import pairwise
from typing import NamedTuple

WINDOW = 4.0
"""Seconds that a rate is measured over."""
HISTORY = 60
"""Seconds of history, with one figure for each."""
_SPACING = 0.5
"""Least seconds between two marks, which bounds their number."""


class Mark(NamedTuple):
    """The tokens and rows counted up to a time, in seconds."""

    time: float
    tokens: int
    rows: int


class Meter:
    """Counts requests by how they ended, steps that failed, and output tokens and rows over time.
    Times are seconds of one clock.
    """

    def __init__(self, now: float) -> None:
        self.finished = self.aborted = self.refused = self.failed_steps = 0
        self.rows_last = 0
        self.step_seconds = 0.0
        self.latest = Mark(now, 0, 0)
        self._marks = deque([self.latest], maxlen=round((HISTORY + WINDOW) / _SPACING) + 1)

    def step(self, begun: float, ended: float, tokens: int, rows: int, num_steps: int) -> None:
        """Record `num_steps` steps with `tokens` output tokens in all; `rows` is the number of rows
        since the engine was made.
        """
        before = self.latest
        if begun - self._marks[-1].time >= _SPACING:
            self._marks.append(Mark(begun, before.tokens, before.rows))
        self.rows_last = (rows - before.rows) // num_steps
        self.step_seconds = (ended - begun) / num_steps
        self.latest = Mark(ended, before.tokens + tokens, rows)

    def rates(self, now: float) -> tuple[float, float]:
        """Tokens and rows per second over the last `WINDOW` seconds, or since the engine was
        made.
        """
        since = max(now - WINDOW, self._marks[0].time)
        if now <= since:
            return 0.0, 0.0
        tokens, rows = self._at(since)
        return (self.latest.tokens - tokens) / (now - since), (self.latest.rows - rows) / (
            now - since
        )

    def history(self, now: float) -> list[float]:
        """Tokens per second in each of the last `HISTORY` seconds, the oldest first."""
        counts = [self._at(now - second)[0] for second in range(HISTORY, -1, -1)]
        return [round(after - before, 1) for before, after in pairwise(counts)]

    def _at(self, time: float) -> tuple[float, float]:
        """Tokens and rows counted up to a time, interpolated between two marks."""
        marks = [*self._marks, self.latest]
        after = bisect_right(marks, time, key=lambda mark: mark.time)
        if after == 0:
            return marks[0].tokens, marks[0].rows
        if after == len(marks):
            return self.latest.tokens, self.latest.rows
        a, b = marks[after - 1 : after + 1]
        share = (time - a.time) / (b.time - a.time)
        return a.tokens + share * (b.tokens - a.tokens), a.rows + share * (b.rows - a.rows)
