"""Compares the acceptance of drafts before and after new weights."""

from collections import deque
from math import sqrt
from typing import Literal

from headrace.stats import ratio

_RECENT = 512
_NEEDED = 200
"""First drafts after new weights until a verdict."""
_MAX_TOKENS = 8192
"""Tokens after which fewer drafts are enough: drafts that do not pay are few."""
_MIN_FALL = 0.02

Verdict = Literal["", "kept", "fell"]


class AcceptanceWatch:
    """The share of the first drafts of each step that were right."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self._before = 0, 0  # right, drafts
        self._since = [0, 0, 0]  # right, drafts, tokens
        self.is_open = False
        """Whether new weights wait for their verdict."""

    @property
    def before(self) -> float:
        """The share before the last new weights."""
        return ratio(*self._before)

    @property
    def now(self) -> float:
        """The share of the last drafts of the present weights."""
        return ratio(sum(self._recent), len(self._recent))

    def record(self, is_right: bool) -> None:
        self._recent.append(is_right)
        self._since[0] += is_right
        self._since[1] += 1

    def count_tokens(self, count: int) -> None:
        self._since[2] += count

    def begin(self, *, is_open: bool) -> None:
        """Begin with new weights. `is_open`: they get a verdict."""
        if self._recent:
            self._before = sum(self._recent), len(self._recent)
        self._recent.clear()
        self._since = [0, 0, 0]
        self.is_open = is_open

    def verdict(self) -> Verdict:
        """Whether acceptance fell since `begin`; empty until enough drafts were measured.

        It fell if the difference exceeds two standard errors, and two percent.
        """
        right, drafts, tokens = self._since
        if not self.is_open or (drafts < _NEEDED and tokens < _MAX_TOKENS):
            return ""
        self.is_open = False
        before, after = self.before, ratio(right, drafts)
        if not drafts or not self._before[1]:
            return "kept"
        variance = before * (1 - before) / self._before[1] + after * (1 - after) / drafts
        return "fell" if before - after > max(_MIN_FALL, 2 * sqrt(variance)) else "kept"
