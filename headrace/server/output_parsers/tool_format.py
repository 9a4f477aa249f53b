"""What a format of tool calls is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import Steps
from headrace.server.output_parsers.tools import Tool
from headrace.server.output_parsers.writer import random_id


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls of tools."""

    name: str
    openers: tuple[str, ...]
    """Texts that begin calls wherever they stand in the answer."""
    read: Callable[[AnswerReader, str], Steps[None]]
    """Reads calls behind an opener, which is "" where the answer begins with them; raises
    MalformedError.
    """
    grammar: Callable[[Lark, Sequence[Tool], bool], str]
    """The expression of one call, or of several where the last argument says so."""
    markers: tuple[str, ...] = ()
    """Further texts of the format that a tokenizer may have as control tokens."""
    bare: str = ""
    """First characters of an answer that may be nothing but calls without an opener; then only
    tools of the request are called.
    """
    new_id: Callable[[], str] = random_id
    """An id for a call to which the model gave none."""
    always: bool = False
    """Whether answers without tools are written in the format, too; then it tells reasoning from
    content itself.
    """

    def answer(self, answer: AnswerReader) -> Steps[None]:
        """Read a whole answer."""
        if self.always:
            return (yield from self.read(answer, ""))
        if self.bare:
            answer.writer.content((yield from answer.space()))
            first = yield from answer.peek()
            if first and first in self.bare:
                yield from answer.attempt("", self.read(answer, ""))
        while opener := (yield from answer.until(self.openers, answer.writer.content)):
            yield from answer.attempt(opener, self.read(answer, opener))
        return None
