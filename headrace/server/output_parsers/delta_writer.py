from collections.abc import Callable
from dataclasses import dataclass
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
    return f"call_{token_hex(12)}"


@dataclass
class _Call:
    name: str
    arguments: str = ""

    def may_become(self, other: "_Call") -> bool:
        return self.name == other.name and other.arguments.startswith(self.arguments)


class DeltaWriter:
    """Collects deltas; drops white space next to a marker."""

    def __init__(
        self,
        new_id: Callable[[], str],
        holds_space: bool,
        max_calls: int | None = None,
        ends_at_repeat: bool = False,
    ) -> None:
        """With `ends_at_repeat`, a call that equals an earlier one and all later text are dropped.

        The start of a call is held as long as the call may become such a repeat.
        """
        self._new_id = new_id
        self._max_calls = max_calls
        self.is_dropping = False
        """Whether a call above `max_calls` has begun, or a call has been repeated."""
        self.has_repeated = False
        """Whether a call has been repeated."""
        self._ends_at_repeat = ends_at_repeat
        self._calls: list[_Call] = []
        self._held_call: list[Delta] | None = None
        """Deltas of the last call, while it may become a repeat."""
        self._holds_space = holds_space
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._after_marker = False
        self._new_line = False
        self._written_kinds: set[type[Content | Reasoning]] = set()
        self._held_space: list[str] = []
        self._held_kind: type[Content | Reasoning] = Content

    def content(self, text: str) -> None:
        self._write(Content, text, self._holds_space)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text, True)

    def boundary(self, new_line: bool = False) -> None:
        self._held_space.clear()
        self._after_marker = True
        self._new_line = new_line

    def start_call(self, name: str, call_id: str = "") -> None:
        self.boundary()
        self._release_call()
        if self._num_calls == self._max_calls:
            self.is_dropping = True
        if self.is_dropping:
            return
        start = ToolCallStart(self._num_calls, call_id or self._new_id(), name)
        self._num_calls += 1
        if self._ends_at_repeat:
            self._calls.append(_Call(name))
            self._held_call = []
        self._append_to_call(start)

    def arguments(self, text: str) -> None:
        if not text or self.is_dropping:
            return
        if self._ends_at_repeat:
            self._calls[-1].arguments += text
        self._append_to_call(ToolCallArguments(self._num_calls - 1, text))

    def _append_to_call(self, delta: Delta) -> None:
        if self._held_call is None:
            self._deltas.append(delta)
            return
        self._held_call.append(delta)
        *earlier, call = self._calls
        if call in earlier and call.arguments:
            self.is_dropping = self.has_repeated = True
            self._held_call = None
        elif not any(call.may_become(other) for other in earlier):
            self._release_call()

    def _release_call(self) -> None:
        self._deltas += self._held_call or ()
        self._held_call = None

    def finish(self) -> None:
        self._release_call()
        if self._held_space:
            self._deltas.append(self._held_kind("".join(self._held_space)))
            self._held_space.clear()

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def _write(self, kind: type[Content | Reasoning], text: str, holds_space: bool) -> None:
        if self._after_marker:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._after_marker = False
            if self._new_line and kind in self._written_kinds:
                self._deltas.append(kind("\n"))
        solid = text.rstrip(SPACE) if holds_space else text
        self._held_kind = kind
        if solid:
            self._deltas.append(kind("".join((*self._held_space, solid))))
            self._written_kinds.add(kind)
            self._held_space.clear()
        if len(solid) < len(text):
            self._held_space.append(text[len(solid) :])
