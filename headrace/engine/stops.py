"""Search for stop strings in text that arrives in pieces (Knuth, Morris and Pratt 1977), one
character at a time.
"""

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple


class StopPattern:
    """A stop string prepared for matching; the sequences of a request share it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [
            0,
            0,
        ]  # for each length of a prefix: the length of the longest shorter prefix that ends it
        for character in text[1:]:
            self._shorter.append(self.advance(self._shorter[-1], character))

    def advance(self, matched: int, character: str) -> int:
        """Length of the longest prefix that ends the text after `character`; `matched` is that
        length before it, less than the full one.
        """
        while matched and self.text[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == character)

    @property
    def border(self) -> int:
        """Length of the longest proper prefix that ends the string itself."""
        return self._shorter[-1]


class Stop(NamedTuple):
    """A stop string that was found."""

    text: str
    end: int  # number of characters of the last piece up to the end of the stop string


class StopFinder:
    """Looks for stop strings in one sequence's text."""

    def __init__(self, patterns: Iterable[StopPattern]) -> None:
        self._patterns = list(patterns)
        self._matched = [0] * len(self._patterns)

    def clone(self) -> "StopFinder":
        """An independent finder that continues this one."""
        clone = copy(self)
        clone._matched = self._matched[:]
        return clone

    @property
    def held(self) -> int:
        """Length of the longest suffix of the text so far that may become a stop string."""
        return max(self._matched, default=0)

    def push(self, piece: str, armed: bool) -> Stop | None:
        """The stop string that ends first in `piece`, the longer of two that end together; always
        None unless `armed`.
        """
        if not self._patterns:
            return None
        for end, character in enumerate(piece, start=1):
            found = [text for i in range(len(self._patterns)) if (text := self._step(i, character))]
            if found and armed:
                return Stop(max(found, key=len), end)
        return None

    def _step(self, i: int, character: str) -> str | None:
        """Advance pattern `i` by a character; returns its text if that completes it."""
        pattern = self._patterns[i]
        matched = pattern.advance(self._matched[i], character)
        complete = matched == len(pattern.text)
        self._matched[i] = pattern.border if complete else matched
        return pattern.text if complete else None
