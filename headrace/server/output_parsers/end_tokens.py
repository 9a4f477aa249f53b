"""The end token of an answer, where control tokens are left in its text."""

from headrace.server.output_parsers.text_reader import markers


class EndTokenFilter:
    """Passes text on without the end token behind it. The same text within the answer stays."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._markers = markers(texts)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain not to belong to an end token at the end."""
        text = self._held + text
        start = min(self._end(text), self._markers.begun(text, 0))
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back and is no end token."""
        return self._held[: self._end(self._held)]

    def _end(self, text: str) -> int:
        """Where the end token behind the text begins; the length of the text where there is
        none.
        """
        return len(text) - max((len(end) for end in self._texts if text.endswith(end)), default=0)
