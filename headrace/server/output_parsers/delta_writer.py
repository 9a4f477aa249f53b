"""Makes deltas of what was read."""

from collections.abc import Callable
from secrets import token_hex

from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from headrace.server.output_parsers.text_reader import SPACE


def random_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{token_hex(12)}"


class DeltaWriter:
    """Deltas in their order. White space beside a marker is layout, so that it is held back until
    text follows.
    """

    def __init__(self, new_id: Callable[[], str], holds_space: bool) -> None:
        """`holds_space`: whether a marker may come after content."""
        self._new_id = new_id
        self._holds_space = holds_space
        self._deltas: list[Delta] = []
        self._calls = 0
        self._after_marker = False
        self._new_line = False
        self._written: set[type[Content | Reasoning]] = set()
        self._gap: list[str] = []  # white space after the last text
        self._kind: type[Content | Reasoning] = Content  # of that text

    def content(self, text: str) -> None:
        """Text for the user."""
        self._write(Content, text, self._holds_space)

    def reasoning(self, text: str) -> None:
        """Text of the model for itself."""
        self._write(Reasoning, text, True)

    def boundary(self, new_line: bool = False) -> None:
        """A marker stood here: the white space on both of its sides is layout. With `new_line` text
        goes on in another line.
        """
        self._gap.clear()
        self._after_marker = True
        self._new_line = new_line

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call begins. The id is the model's own, or a new one."""
        self.boundary()
        self._deltas.append(ToolCallStart(self._calls, call_id or self._new_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        if text:
            self._deltas.append(ToolCallArguments(self._calls - 1, text))

    def finish(self) -> None:
        """No more text comes: white space that was held back is part of it."""
        if self._gap:
            self._deltas.append(self._kind("".join(self._gap)))
            self._gap.clear()

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def _write(self, kind: type[Content | Reasoning], text: str, holds_space: bool) -> None:
        if self._after_marker:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._after_marker = False
            if self._new_line and kind in self._written:
                self._deltas.append(kind("\n"))
        solid = text.rstrip(SPACE) if holds_space else text
        self._kind = kind
        if solid:
            self._deltas.append(kind("".join((*self._gap, solid))))
            self._written.add(kind)
            self._gap.clear()
        if len(solid) < len(text):
            self._gap.append(text[len(solid) :])
