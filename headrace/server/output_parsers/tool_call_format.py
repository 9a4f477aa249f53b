"""What a format of tool calls is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.server.output_parsers.delta_writer import random_id
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tools import Tool


@dataclass(frozen=True)
class ToolCallFormat:
    """How a model writes calls of tools."""

    name: str
    openers: tuple[str, ...]
    """Texts that begin calls wherever they stand in the answer."""
    read: Callable[[OutputReader, str], Steps[None]]
    """Reads calls behind an opener, which is "" where the answer begins with them; raises
    MalformedError.
    """
    grammar: Callable[[LarkGrammar, Sequence[Tool], bool], str]
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

    def reader(self, reader: OutputReader) -> Steps[None]:
        """Read a whole answer."""
        if self.always:
            return (yield from self.read(reader, ""))
        if self.bare:
            reader.writer.content((yield from reader.space()))
            first = yield from reader.peek()
            if first and first in self.bare:
                yield from reader.attempt("", self.read(reader, ""))
        while opener := (yield from reader.until(self.openers, reader.writer.content)):
            yield from reader.attempt(opener, self.read(reader, opener))
        return None
