"""Text that comes in pieces, read as if it were whole.

A parser is a generator over a `Reader`: it asks for what comes next, and where that is not known
yet it yields and goes on with the next piece. So what it makes of a text does not depend on how the
text was cut, and it never waits for more than it must: only while what is there may yet become the
marker in question.
"""

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

from headrace.server.output_parsers.json_scanner import JsonScanner

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Reads until it has a T, and yields where it needs more text."""

SPACE = " \t\r\n"
MAX_NAME = 1024
"""Characters of a name, a key or a number."""

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')


class MalformedError(Exception):
    """The text is not what the format says."""


class Markers:
    """Finds the first of some markers, and where one may have begun. None of those that are looked
    for together lies within another.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._first = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts), default=1)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first marker from `at` on."""
        return self._pattern.search(text, at)

    def begun(self, text: str, at: int) -> int:
        """Where the longest end of the text begins that may become a marker; the length of the text
        where there is none.
        """
        start = max(at, len(text) - self._longest + 1)
        positions = (
            i
            for i in range(start, len(text))
            if text[i] in self._first and text[i:] in self._beginnings
        )
        return next(positions, len(text))


markers = lru_cache(256)(Markers)


class TextReader:
    """The text of an answer as far as it has come; what has been read of it is gone."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None

    @property
    def held(self) -> int:
        """Characters that have come and have not been read."""
        return len(self._text) - self._at

    def push(self, text: str) -> None:
        """The next piece of the text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def keep(self, before: str) -> None:
        """From now on keep what is read, after `before`, in case that it turns out malformed."""
        self._kept = [before]

    def forget(self) -> None:
        """What was kept has become part of a call."""
        if self._kept:
            self._kept.clear()

    def kept(self) -> str:
        """What was read since `keep` or `forget`; nothing is kept from now on."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def peek(self) -> Steps[str]:
        """The next character, which stays; "" at the end of the text."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], take: Callable[[str], object]) -> Steps[None]:
        """Give the longest run of what `pattern`, a repeated class of characters, matches to
        `take`, as it comes.
        """
        while True:
            match = pattern.match(self._text, self._at)
            take(self._read(match.end() if match else self._at))
            if self._at < len(self._text) or self.ended:
                return
            yield

    def word(self, pattern: re.Pattern[str], most: int = MAX_NAME) -> Steps[str]:
        """The run of what `pattern`, a repeated class of characters, matches. Raises MalformedError
        where it has more than `most`.
        """
        word = ""
        while True:
            match = pattern.match(self._text, self._at, self._at + most + 1 - len(word))
            word += self._read(match.end() if match else self._at)
            if len(word) > most:
                raise MalformedError
            if self._at < len(self._text) or self.ended:
                return word
            yield

    def space(self) -> Steps[str]:
        """The white space that comes next."""
        pieces: list[str] = []
        yield from self.run(_SPACES, pieces.append)
        return "".join(pieces)

    def next_is(self, marker: str) -> Steps[bool]:
        """Whether `marker` comes next; it is read if so, and nothing otherwise."""
        return bool((yield from self.one_of((marker,))))

    def one_of(self, texts: tuple[str, ...]) -> Steps[str]:
        """The one of these that comes next, which is read; "" where none does, and nothing is read.
        None begins another.
        """
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return self._read(self._at + len(text))
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if self.ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def expect(self, marker: str) -> Steps[None]:
        """Read `marker`. Raises MalformedError where something else comes."""
        if not (yield from self.next_is(marker)):
            raise MalformedError

    def until(self, texts: tuple[str, ...], take: Callable[[str], object]) -> Steps[str]:
        """Give all that comes before the first of these markers to `take`; returns the marker,
        which is read; "" at the end.
        """
        find = markers(texts)
        while True:
            if match := find.find(self._text, self._at):
                take(self._read(match.start()))
                return self._read(match.end())
            take(self._read(len(self._text) if self.ended else find.begun(self._text, self._at)))
            if self.ended:
                return ""
            yield

    def value(self, take: Callable[[str], object]) -> Steps[None]:
        """Give the JSON value that comes next to `take`, as it comes. Raises MalformedError where
        it is none.
        """
        scanner = JsonScanner()
        while True:
            take(self._read(scanner.feed(self._text, self._at)))
            if self.ended:
                scanner.finish()
            if scanner.failed:
                raise MalformedError
            if scanner.done:
                return
            yield

    def string(self) -> Steps[str]:
        """The short JSON string that comes next. Raises MalformedError where it is none, or a long
        one.
        """
        yield from self.expect('"')
        raw = ""
        while True:
            raw += yield from self.word(_IN_STRING, MAX_NAME - len(raw))
            if (yield from self.peek()) != "\\":
                break
            raw += yield from self.character()
            raw += yield from self.character()
            if len(raw) > MAX_NAME:
                raise MalformedError
        yield from self.expect('"')
        try:
            return str(json.loads(f'"{raw}"', strict=False))
        except ValueError:
            raise MalformedError from None

    def character(self) -> Steps[str]:
        """The next character, which is read. Raises MalformedError at the end of the text."""
        character = yield from self.peek()
        if not character:
            raise MalformedError
        return self._read(self._at + 1)

    def _read(self, end: int) -> str:
        """Go on to `end`, and return what lies before it."""
        text, self._at = self._text[self._at : end], end
        if self._kept is not None and text:
            self._kept.append(text)
        return text
