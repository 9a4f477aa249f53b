from collections.abc import Mapping

from headrace.server.output_parsers.delta_writer import DeltaWriter
from headrace.server.output_parsers.text_reader import MalformedError, Steps, TextReader
from headrace.server.output_parsers.tools import NAME, Tool


class OutputReader(TextReader):
    """Reads the text of an output and writes its deltas.

    Text that does not form a tool call becomes content.
    """

    def __init__(self, writer: DeltaWriter, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self.tools = tools
        self.writer = writer

    def start_call(self, name: str, call_id: str = "") -> None:
        """Start a tool call. Raises MalformedError if no tool can have this name."""
        if not NAME.fullmatch(name):
            raise MalformedError
        self.writer.start_call(name, call_id)
        self.forget()

    def arguments(self, text: str) -> None:
        self.writer.arguments(text)
        self.forget()

    def attempt(self, before: str, steps: Steps[None]) -> Steps[None]:
        """Read tool calls by `steps`; malformed text becomes content."""
        self.keep(before)
        try:
            yield from steps
        except MalformedError:
            self.writer.content(self.take_kept())
        finally:
            self.take_kept()
