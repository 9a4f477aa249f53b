"""Text that knows where its characters come from: a chat template, or the caller's messages.

A template rendered with `TracedText` gives the same text, because every method returns the
text of `str`. Methods that are not traced give characters of unknown origin.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

LITERAL, INSERTED, CONTINUED, UNKNOWN = "lic?"
"""Origins of a character: the template, a value, the content to continue, or unknown."""
_CONVERSION = re.compile("%(.)", re.DOTALL)


class TracedText(str):
    """Text with an origin per character."""

    __slots__ = ("_origins",)
    _origins: str

    def __new__(cls, text: str = "", origins: str = UNKNOWN) -> "TracedText":
        """`origins` is one origin for all characters, or one per character."""
        traced = super().__new__(cls, text)
        traced._origins = origins * len(text) if len(origins) == 1 else origins
        return traced

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        # Text marked as safe escapes the other operand.
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return TracedText(str.__add__(self, other), self._origins + origins(other))

    def __radd__(self, other: Any) -> Any:
        return TracedText(other).__add__(self) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TracedText":
        return TracedText(str.__mul__(self, count), str.__mul__(self._origins, count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> "TracedText":
        text = str.__mod__(self, values)
        items = list(values) if isinstance(values, tuple) else [values]
        parts: list[str] = []
        start = 0
        for match in _CONVERSION.finditer(self):
            parts.append(self[start : match.start()])
            start = match.end()
            if match[1] == "s" and items:
                item = items.pop(0)
                parts.append(item if isinstance(item, str) else TracedText(str(item)))
            elif match[1] == "%":
                parts.append(self[start - 1 : start])
            else:
                return TracedText(text)
        traced = concat([*parts, self[start:]])
        return traced if traced == text else TracedText(text)

    def __rmod__(self, other: Any) -> Any:
        return TracedText(other).__mod__(self) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedText":
        return TracedText(str.__getitem__(self, key), self._origins[key])

    def __iter__(self) -> Iterator["TracedText"]:
        return (self[i] for i in range(len(self)))

    def _cut(self, start: int, text: str) -> "TracedText":
        return TracedText(text, self._origins[start : start + len(text)])

    def strip(self, chars: str | None = None, /) -> "TracedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TracedText":
        text = str.lstrip(self, chars)
        return self._cut(len(self) - len(text), text)

    def rstrip(self, chars: str | None = None, /) -> "TracedText":
        return self._cut(0, str.rstrip(self, chars))

    def removeprefix(self, prefix: str, /) -> "TracedText":
        text = str.removeprefix(self, prefix)
        return self._cut(len(self) - len(text), text)

    def removesuffix(self, suffix: str, /) -> "TracedText":
        return self._cut(0, str.removesuffix(self, suffix))

    def _find_all(self, parts: Iterable[str], gap: int = 0) -> list[Any]:
        """Trace parts of this text, which are in its order and at least `gap` apart."""
        traced, start = [], 0
        for part in parts:
            start = self.find(part, start) if not gap else start
            traced.append(self._cut(start, part))
            start += len(part) + gap
        return traced

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._find_all(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._find_all(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        lines = self._find_all(str.splitlines(self, True))
        if keepends:
            return lines
        ends = str.splitlines(self)
        return [line[: len(end)] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        before, found, after = str.partition(self, sep)
        return self[: len(before)], self._cut(len(before), found), self[len(self) - len(after) :]

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        before, found, after = str.rpartition(self, sep)
        return self[: len(before)], self._cut(len(before), found), self[len(self) - len(after) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "TracedText":
        if not old:
            return TracedText(str.replace(self, old, new, count))
        return _traced(new).join(self.split(old, count))

    def join(self, items: Iterable[str], /) -> "TracedText":
        parts = list(items)
        text = str.join(self, parts)
        return TracedText(text, self._origins.join(map(origins, parts)))

    def center(self, width: SupportsIndex, fill: str = " ", /) -> "TracedText":
        text = str.center(self, width, fill)
        left = next(i for i in range(len(text) + 1) if text.startswith(self, i))
        return TracedText(
            text, LITERAL * left + self._origins + LITERAL * (len(text) - left - len(self))
        )

    def ljust(self, width: SupportsIndex, fill: str = " ", /) -> "TracedText":
        text = str.ljust(self, width, fill)
        return TracedText(text, self._origins + LITERAL * (len(text) - len(self)))

    def rjust(self, width: SupportsIndex, fill: str = " ", /) -> "TracedText":
        text = str.rjust(self, width, fill)
        return TracedText(text, LITERAL * (len(text) - len(self)) + self._origins)

    def _changed(self, change: Callable[[str], str]) -> "TracedText":
        text = change(self)
        return TracedText(text, self._origins if len(text) == len(self) else UNKNOWN)

    def upper(self) -> "TracedText":
        return self._changed(str.upper)

    def lower(self) -> "TracedText":
        return self._changed(str.lower)

    def capitalize(self) -> "TracedText":
        return self._changed(str.capitalize)

    def title(self) -> "TracedText":
        return self._changed(str.title)

    def swapcase(self) -> "TracedText":
        return self._changed(str.swapcase)

    def casefold(self) -> "TracedText":
        return self._changed(str.casefold)


def origins(text: str) -> str:
    """Return one origin per character."""
    return text._origins if isinstance(text, TracedText) else UNKNOWN * len(text)


def concat(parts: Iterable[str]) -> TracedText:
    return TracedText("", LITERAL).join(parts)


def traced_value(value: Any, origin: str = INSERTED) -> Any:
    """Trace all text in a JSON value, keys included."""
    if isinstance(value, str):
        return TracedText(value, origin)
    if isinstance(value, dict):
        return {TracedText(key, origin): traced_value(item, origin) for key, item in value.items()}
    if isinstance(value, list):
        return [traced_value(item, origin) for item in value]
    return value


def spans(text: str, wanted: str) -> list[tuple[int, int]]:
    """Return start and end of the runs of characters with the wanted origins."""
    runs = re.finditer(f"[{re.escape(wanted)}]+", origins(text))
    return [match.span() for match in runs]


def _traced(text: str) -> TracedText:
    return text if isinstance(text, TracedText) else TracedText(text)
