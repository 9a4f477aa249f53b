"""Finds stop strings in text that arrives in pieces (Knuth, Morris and Pratt 1977).

Some pieces are hidden: control tokens that the output leaves out. Only patterns that contain a
control token see them.
"""

from collections.abc import Iterable
from copy import copy
from typing import Literal, NamedTuple

from headrace.sampling_params import ReasoningMarkers

_Stage = Literal["start", "reasoning", "gap", "answer"]


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


class AnswerFinder:
    """Finds the answer after the reasoning, in whichever pieces the text arrives."""

    def __init__(self, markers: ReasoningMarkers) -> None:
        self._markers = markers
        self._opener = markers.opener
        self._stage: _Stage = "reasoning" if markers.has_begun else "start"
        self._held = ""
        """The last text, which may become a marker."""

    @property
    def has_begun(self) -> bool:
        return self._stage == "answer"

    def push(self, piece: str) -> tuple[str, str]:
        """Append text; returns the new text before the answer, and the new text of the answer."""
        if self._stage == "answer":
            return "", piece
        text, self._held = self._held + piece, ""
        position = 0
        if self._stage == "start":
            begin, position = self._markers.begin, _without_space(text, 0)
            if not text.startswith(begin, position):
                if begin.startswith(text[position:]):
                    self._held = text
                    return "", ""
                self._stage = "answer"
                return "", text
            position += len(begin)
            self._stage = "reasoning"

        if self._stage == "reasoning":
            end = self._markers.end
            found = text.find(end, position)
            if found < 0:
                return self._hold(text, len(text) - _num_begun(text[position:], end))
            position = found + len(end)
            self._stage = "gap"

        position = _without_space(text, position)
        if self._opener:
            if not text.startswith(self._opener, position):
                if self._opener.startswith(text[position:]):
                    return self._hold(text, position)
            else:
                position = _without_space(text, position + len(self._opener))
            self._opener = ""
        if position < len(text):
            self._stage = "answer"
        return text[:position], text[position:]

    def flush(self) -> str:
        """Return the text that was held; it becomes no marker."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str, start: int) -> tuple[str, str]:
        self._held = text[start:]
        return text[:start], ""


def _without_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())


def _num_begun(text: str, marker: str) -> int:
    """Count the last characters that may begin the marker."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)


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
        self.has_patterns = bool(self._patterns)
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
