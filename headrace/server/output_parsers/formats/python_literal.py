import json
import math
import re
import string
import sys
from collections.abc import Callable

from headrace.server.output_parsers.text_reader import MalformedError, Steps, TextReader

_CLOSING = {"[": "]", "{": "}"}
_WORD = re.compile(r"[A-Za-z0-9_+.\-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
}
_ESCAPES |= {character: character for character in "\\'\"/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_literal(reader: TextReader, take: Callable[[str], object]) -> Steps[None]:
    """Read a Python literal and pass it to `take` as JSON. Raises MalformedError."""
    containers: list[str] = []  # the brackets that close the open containers
    separator = ""  # written when another item certainly follows
    while True:
        yield from reader.space()
        first = yield from reader.peek()
        # Else the container ends: it is empty, or its last item is followed by a comma.
        if not containers or first != containers[-1]:
            take(separator)
            if containers[-1:] == ["}"]:
                yield from _key(reader, take, first)
                first = yield from reader.peek()
            if first in _CLOSING:
                take((yield from reader.character()))
                containers.append(_CLOSING[first])
                separator = ""
                continue
            yield from _scalar(reader, take, first)
        yield from _close(reader, take, containers)
        if not containers:
            return
        separator = ", "


def _close(reader: TextReader, take: Callable[[str], object], containers: list[str]) -> Steps[None]:
    while containers:
        yield from reader.space()
        if (yield from reader.next_is(",")):
            return
        yield from reader.expect(containers[-1])
        take(containers.pop())


def _key(reader: TextReader, take: Callable[[str], object], first: str) -> Steps[None]:
    if first not in _IN_STRING:
        raise MalformedError
    yield from _string(reader, take, first)
    yield from reader.space()
    yield from reader.expect(":")
    take(": ")
    yield from reader.space()


def _scalar(reader: TextReader, take: Callable[[str], object], first: str) -> Steps[None]:
    if first in _IN_STRING:
        yield from _string(reader, take, first)
    else:
        take(_constant((yield from reader.word(_WORD))))


def _string(reader: TextReader, take: Callable[[str], object], quote: str) -> Steps[None]:
    yield from reader.character()
    take('"')
    triple = yield from reader.next_is(quote * 2)
    while True:
        yield from reader.run(_IN_STRING[quote], lambda text: take(_inner(text)))
        if (yield from reader.next_is("\\")):
            take((yield from _escape(reader)))
        elif (yield from reader.next_is(quote * 3 if triple else quote)):
            take('"')
            return
        else:
            take(_inner((yield from reader.character())))  # a quote within triple ones


def _escape(reader: TextReader) -> Steps[str]:
    kind = yield from reader.character()
    if kind not in _HEX_DIGITS:
        return _inner(_ESCAPES.get(kind, "\\" + kind))
    digits = ""
    while len(digits) < _HEX_DIGITS[kind]:
        digits += yield from reader.character()
    if not set(digits) <= set(string.hexdigits) or int(digits, 16) > sys.maxunicode:
        raise MalformedError
    return json.dumps(chr(int(digits, 16)))[1:-1]  # half of a surrogate pair stays an escape


def _constant(word: str) -> str:
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    try:
        number = (
            float(word)
            if any(c in word for c in ".eE") and not word.lower().startswith("0x")
            else int(word, 0)
        )
    except ValueError:
        raise MalformedError from None
    if not math.isfinite(number):
        raise MalformedError
    return json.dumps(number)


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
