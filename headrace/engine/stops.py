"""Finds stop strings in text that arrives in pieces (Knuth, Morris and Pratt 1977)."""

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple


class StopPattern:
    """A stop string prepared for matching."""

    def __init__(self, text: str) -> None:
        self.text = text
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


class StopFinder:
    def __init__(self, patterns: Iterable[StopPattern]) -> None:
        self._patterns = list(patterns)
        self._matched = [0] * len(self._patterns)

    def clone(self) -> "StopFinder":
        clone = copy(self)
        clone._matched = self._matched[:]
        return clone

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that may become a stop string."""
        return max(self._matched, default=0)

    def push(self, piece: str, armed: bool) -> Stop | None:
        """Append text; returns the stop string that ends first, if `armed`; of two, the longer."""
        if not self._patterns:
            return None
        for end, character in enumerate(piece, start=1):
            completed = [
                text
                for index in range(len(self._patterns))
                if (text := self._advance(index, character))
            ]
            if completed and armed:
                return Stop(max(completed, key=len), end)
        return None

    def _advance(self, index: int, character: str) -> str | None:
        pattern = self._patterns[index]
        matched = pattern.advance(self._matched[index], character)
        is_complete = matched == len(pattern.text)
        self._matched[index] = pattern.border if is_complete else matched
        return pattern.text if is_complete else None
