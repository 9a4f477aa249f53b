"""Finds stop strings in text that arrives in pieces (Knuth, Morris and Pratt 1977).

Some pieces are hidden: control tokens that the output leaves out. Only patterns that contain a
control token see them.
"""

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple


class StopPattern:
    """A stop string prepared for matching."""

    def __init__(self, text: str, sees_hidden: bool = False) -> None:
        self.text = text
        self.sees_hidden = sees_hidden
        # For each length of a matched prefix: the length of the longest shorter prefix that also
        # matches the end of it.
        self._fallback = [0, 0]
        for character in text[1:]:
            self._fallback.append(self.advance(self._fallback[-1], character))

    def advance(self, matched: int, character: str) -> int:
        """Return the length of the longest matched prefix after `character`."""
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == character)

    @property
    def border(self) -> int:
        """Length of the longest proper prefix that is also a suffix."""
        return self._fallback[-1]


class Stop(NamedTuple):
    text: str
    end: int  # characters of the last piece up to the end of the stop string
    num_visible: int  # characters of the stop string that are not hidden


class StopFinder:
    def __init__(self, patterns: Iterable[StopPattern]) -> None:
        self._patterns = list(patterns)
        self._matched = [0] * len(self._patterns)
        self._length = 0  # of the text with its hidden pieces
        self._hidden: list[tuple[int, int]] = []  # start and end of hidden pieces
        self.sees_hidden = any(pattern.sees_hidden for pattern in self._patterns)

    def clone(self) -> "StopFinder":
        clone = copy(self)
        clone._matched = self._matched[:]
        clone._hidden = self._hidden[:]
        return clone

    @property
    def num_held(self) -> int:
        """Visible characters of the longest end of the text that may become a stop string."""
        return max(map(self._num_visible, self._patterns, self._matched), default=0)

    def push(self, piece: str, armed: bool, hidden: bool = False) -> Stop | None:
        """Append text; returns the stop string that ends first, if `armed`; of two, the longer."""
        if not self._patterns:
            return None
        if hidden:
            self._hidden.append((self._length, self._length + len(piece)))
        for end, character in enumerate(piece, start=1):
            self._length += 1
            completed = [
                pattern
                for index, pattern in enumerate(self._patterns)
                if (pattern.sees_hidden or not hidden) and self._advance(index, character)
            ]
            if completed and armed:
                longest = max(completed, key=lambda pattern: len(pattern.text))
                return Stop(longest.text, end, self._num_visible(longest, len(longest.text)))
        longest_match = max(self._matched)
        self._hidden = [run for run in self._hidden if run[1] > self._length - longest_match]
        return None

    def _advance(self, index: int, character: str) -> bool:
        pattern = self._patterns[index]
        matched = pattern.advance(self._matched[index], character)
        is_complete = matched == len(pattern.text)
        self._matched[index] = pattern.border if is_complete else matched
        return is_complete

    def _num_visible(self, pattern: StopPattern, matched: int) -> int:
        """Count the visible characters of the last `matched` ones that the pattern has seen."""
        if not pattern.sees_hidden:
            return matched
        start = self._length - matched
        runs = ((max(first, start), min(last, self._length)) for first, last in self._hidden)
        return matched - sum(max(0, last - first) for first, last in runs)
