"""The reader of an answer in which calls may stand, and how calls are looked for in it."""

from collections.abc import Mapping

from headrace.server.output_parsers.delta_writer import DeltaWriter
from headrace.server.output_parsers.text_reader import MalformedError, Steps, TextReader
from headrace.server.output_parsers.tools import NAME, Tool


class OutputReader(TextReader):
    """The text of an answer, and what is made of it.

    A call begins once its name and the beginning of its arguments are known. What was read until
    then is kept, and is content where it turns out to be something else. From then on the call
    stays one: where its arguments go wrong they end, and the rest is content.
    """

    def __init__(self, writer: DeltaWriter, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self.tools = tools
        self.writer = writer

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call begins: what was kept is a part of it. Raises MalformedError where this can be no
        tool's name.
        """
        if not NAME.fullmatch(name):
            raise MalformedError
        self.writer.begin_call(name, call_id)
        self.forget()

    def arguments(self, text: str) -> None:
        """More of the arguments of the call."""
        self.writer.arguments(text)
        self.forget()

    def attempt(self, before: str, steps: Steps[None]) -> Steps[None]:
        """Read calls by `steps`, after `before`, which was read already. What is malformed becomes
        content.
        """
        self.keep(before)
        try:
            yield from steps
        except MalformedError:
            self.writer.content(self.kept())
        finally:
            self.kept()
