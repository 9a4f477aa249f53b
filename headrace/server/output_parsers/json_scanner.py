"""Finds the end of a JSON value in text that comes in pieces."""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[ \t\r\n,:A-Za-z0-9+.\-]*")
"""What may stand between strings and brackets: space, separators, numbers and literals."""
_WORD = re.compile(r"[A-Za-z0-9+.\-]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Reads one JSON value by its structure: strings, escapes, and brackets that match. Each
    character is looked at once.

    The order of keys, colons and commas is not checked: arguments are passed on as the model wrote
    them. What no JSON has outside of strings, and a bracket that does not match, make it fail.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # the brackets that will close those that are open
        self._in_string = False
        self._escaped = False
        self._in_word = False

    def feed(self, text: str, at: int) -> int:
        """Read on in `text` from `at`; returns where the value ended or failed, or the length of
        the text.
        """
        while at < len(text) and not self.done and not self.failed:
            if self._in_string:
                at = self._string(text, at)
            elif self._in_word:
                at = _WORD.match(text, at).end()  # type: ignore[union-attr]
                self.done = at < len(text)
            else:
                at = self._structure(text, at)
        return at

    def finish(self) -> None:
        """The text has ended: a number or a literal outside of brackets ends with it, and anything
        else fails.
        """
        if not self.done:
            self.done, self.failed = self._in_word, not self._in_word

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._open
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        if self._open:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        elif not self._open and _WORD.fullmatch(character):
            self._in_word = True
        else:
            self.failed = True
            return at
        return at + 1
