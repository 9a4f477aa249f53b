import re

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[ \t\r\n,:A-Za-z0-9+.\-]*")
_WORD = re.compile(r"[A-Za-z0-9+.\-]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Finds the end of one JSON value by its strings and brackets, in linear time."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._in_word = False

    def feed(self, text: str, start: int) -> int:
        """Scan from `start`; returns the end of the value, of an error, or of the text."""
        position = start
        while position < len(text) and not self.done and not self.failed:
            if self._in_string:
                position = self._string(text, position)
            elif self._in_word:
                position = _WORD.match(text, position).end()  # type: ignore[union-attr]
                self.done = position < len(text)
            else:
                position = self._structure(text, position)
        return position

    def finish(self) -> None:
        if not self.done:
            self.done, self.failed = self._in_word, not self._in_word

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        position = _IN_STRING.match(text, position).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        if text[position] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return position + 1

    def _structure(self, text: str, position: int) -> int:
        if self._closers:
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
            if position == len(text):
                return position
        character = text[position]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closers.append(_CLOSING[character])
        elif self._closers and character == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        elif not self._closers and _WORD.fullmatch(character):
            self._in_word = True
        else:
            self.failed = True
            return position
        return position + 1
