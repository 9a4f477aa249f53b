"""Removes the end token of an output with control tokens."""

from headrace.server.output_parsers.text_reader import markers


class EndTokenFilter:
    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._markers = markers(texts)
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        start = min(self._end(text), self._markers.partial(text, 0))
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        return self._held[: self._end(self._held)]

    def _end(self, text: str) -> int:
        return len(text) - max((len(end) for end in self._texts if text.endswith(end)), default=0)
