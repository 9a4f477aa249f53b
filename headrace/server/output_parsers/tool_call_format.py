"""The interface of a tool-call format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.server.output_parsers.delta_writer import random_id
from headrace.server.output_parsers.fenced_calls import (
    OPENERS,
    read_list,
    read_objects,
    read_opened,
)
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.reasoning_formats import ReasoningState
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tools import Tool


@dataclass(frozen=True)
class ToolCallFormat:
    """The syntax in which a model writes tool calls."""

    name: str
    openers: tuple[str, ...]
    """Texts that start tool calls anywhere in an output."""
    read: Callable[[OutputReader, str], Steps[None]]
    """Reads the tool calls after an opener; raises MalformedError."""
    grammar: Callable[[LarkGrammar, Sequence[Tool], bool], str]
    """Matches one tool call, or several if the last argument is true."""
    markers: tuple[str, ...] = ()
    """Further texts that can be control tokens."""
    bare: str = ""
    """First characters of calls without an opener. They must name a tool of the request."""
    new_id: Callable[[], str] = random_id
    envelope: Callable[[LarkGrammar, str, ReasoningState], str] | None = None
    """Matches a whole output with a restricted text, if the format has its own reasoning."""
    always: bool = False
    """Whether all outputs follow the format; then it also reads reasoning."""
    reasoning: tuple[str, str] | None = None
    """Begin and end of the reasoning that the format reads."""
    answer_opener: str = ""
    """Text between this reasoning and the answer."""

    def read_output(self, reader: OutputReader) -> Steps[None]:
        if self.always:
            return (yield from self.read(reader, ""))
        reader.writer.content((yield from reader.space()))
        first = yield from reader.peek()
        if first and first in self.bare:
            yield from reader.attempt("", self.read(reader, ""))
        elif first == "{":
            yield from reader.attempt("", read_objects(reader))
        elif first == "[" and not any(opener.startswith("[") for opener in self.openers):
            yield from reader.attempt("", read_list(reader))
        openers = (*self.openers, *OPENERS)
        while opener := (yield from reader.until(openers, reader.writer.content)):
            is_own = opener in self.openers
            steps = self.read(reader, opener) if is_own else read_opened(reader, opener)
            yield from reader.attempt(opener, steps)
        return None
