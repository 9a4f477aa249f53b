"""Reads streamed text as if it were complete.

A parser is a generator that yields while it waits for text, so chunks do not affect its result.
"""

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

from headrace.server.output_parsers.json_scanner import JsonScanner

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Yields whenever it needs more text, and returns a T."""

SPACE = " \t\r\n"
MAX_NAME = 1024
"""Characters of a name, a key or a number."""

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')


class MalformedError(Exception):
    """The text does not follow its format."""


class Markers:
    """Finds the first marker in a text; no marker may contain another."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._prefixes = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._first_characters = frozenset(text[0] for text in texts)
        self._max_length = max(map(len, texts), default=1)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def partial(self, text: str, start: int) -> int:
        """Return the position of an incomplete marker at the end, or the text's length."""
        positions = (
            i
            for i in range(max(start, len(text) - self._max_length + 1), len(text))
            if text[i] in self._first_characters and text[i:] in self._prefixes
        )
        return next(positions, len(text))


markers = lru_cache(256)(Markers)


class TextReader:
    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._position = 0
        self._kept: list[str] | None = None

    @property
    def num_unread(self) -> int:
        return len(self._text) - self._position

    def push(self, text: str) -> None:
        self._text, self._position = self._text[self._position :] + text, 0

    def keep(self, before: str) -> None:
        """Keep `before` and all later text, in case it is malformed."""
        self._kept = [before]

    def forget(self) -> None:
        if self._kept:
            self._kept.clear()

    def take_kept(self) -> str:
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def peek(self) -> Steps[str]:
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def run(self, pattern: re.Pattern[str], take: Callable[[str], object]) -> Steps[None]:
        """Read a run of a character class and pass it to `take`."""
        while True:
            match = pattern.match(self._text, self._position)
            take(self._read(match.end() if match else self._position))
            if self._position < len(self._text) or self.ended:
                return
            yield

    def word(self, pattern: re.Pattern[str], max_length: int = MAX_NAME) -> Steps[str]:
        """Read a run of a character class. Raises MalformedError above `max_length`."""
        word = ""
        while True:
            limit = self._position + max_length + 1 - len(word)
            match = pattern.match(self._text, self._position, limit)
            word += self._read(match.end() if match else self._position)
            if len(word) > max_length:
                raise MalformedError
            if self._position < len(self._text) or self.ended:
                return word
            yield

    def space(self) -> Steps[str]:
        pieces: list[str] = []
        yield from self.run(_SPACES, pieces.append)
        return "".join(pieces)

    def next_is(self, marker: str) -> Steps[bool]:
        return bool((yield from self.one_of((marker,))))

    def one_of(self, texts: tuple[str, ...]) -> Steps[str]:
        """Read and return the next text, or "". No text may start with another."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._position):
                    return self._read(self._position + len(text))
            rest = self._text[self._position : self._position + max(map(len, texts))]
            if self.ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def closing(self, marker: str) -> Steps[bool]:
        """Read `marker`, or its beginning if the output ends within it."""
        if (yield from self.next_is(marker)):
            return True
        rest = self._text[self._position :]
        if not (self.ended and rest and marker.startswith(rest)):
            return False
        self._read(len(self._text))
        return True

    def expect(self, marker: str) -> Steps[None]:
        """Read `marker`. Raises MalformedError."""
        if not (yield from self.next_is(marker)):
            raise MalformedError

    def until(self, texts: tuple[str, ...], take: Callable[[str], object]) -> Steps[str]:
        find = markers(texts)
        while True:
            if match := find.find(self._text, self._position):
                take(self._read(match.start()))
                return self._read(match.end())
            end = len(self._text)
            take(self._read(end if self.ended else find.partial(self._text, self._position)))
            if self.ended:
                return ""
            yield

    def value(self, take: Callable[[str], object]) -> Steps[None]:
        """Pass a JSON value to `take`. Raises MalformedError."""
        scanner = JsonScanner()
        while True:
            take(self._read(scanner.feed(self._text, self._position)))
            if self.ended:
                scanner.finish()
            if scanner.failed:
                raise MalformedError
            if scanner.done:
                return
            yield

    def string(self) -> Steps[str]:
        """Read a JSON string of up to `MAX_NAME` characters. Raises MalformedError."""
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
        character = yield from self.peek()
        if not character:
            raise MalformedError
        return self._read(self._position + 1)

    def _read(self, end: int) -> str:
        text, self._position = self._text[self._position : end], end
        if self._kept is not None and text:
            self._kept.append(text)
        return text
