"""Reads a model's answer as it comes: reasoning, content and calls of tools."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.server.output_parsers.delta_writer import DeltaWriter, random_id
from headrace.server.output_parsers.deltas import Delta
from headrace.server.output_parsers.end_tokens import EndTokenFilter
from headrace.server.output_parsers.formats import detect_tool_call_format, tool_call_format_by_name
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.reasoning_formats import (
    ReasoningFormat,
    detect_reasoning_format,
    reasoning_format_by_name,
    split_reasoning,
)
from headrace.server.output_parsers.text_reader import Steps, TextReader
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool


@dataclass(frozen=True)
class OutputFormat:
    """How a model writes its answers. One for each model, chosen at start."""

    tool_call_format: ToolCallFormat | None = None
    reasoning_format: ReasoningFormat | None = None

    @classmethod
    def of(
        cls, template: str, tool_call_format: str | None = None, reasoning_format: str | None = None
    ) -> "OutputFormat":
        """By the text of the chat template (where there is a second one for tools, by both), or by
        names; "none" turns one off.

        Raises RequestError for an unknown name.
        """
        return cls(
            detect_tool_call_format(template)
            if tool_call_format is None
            else None
            if tool_call_format == "none"
            else tool_call_format_by_name(tool_call_format),
            detect_reasoning_format(template)
            if reasoning_format is None
            else None
            if reasoning_format == "none"
            else reasoning_format_by_name(reasoning_format),
        )

    def needs_special_tokens(self, control_tokens: Collection[str], with_tools: bool) -> bool:
        """Whether the engine must leave control tokens in the text: whether a marker is one. With
        them comes the end token.
        """
        tool_call_format = self._tool_call_format(with_tools)
        markers = (
            ()
            if tool_call_format is None
            else (*tool_call_format.openers, *tool_call_format.markers)
        )
        return any(
            marker in control_tokens
            for marker in (
                *markers,
                *(self.reasoning_format.markers if self.reasoning_format else ()),
            )
        )

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return self.reasoning_format is not None and self.reasoning_format.starts_in_reasoning(
            prompt
        )

    def parser(
        self,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Tool] = (),
        end_tokens: Iterable[str] = (),
    ) -> "OutputParser":
        """A parser for one answer. Without `tools` nothing is a call."""
        return OutputParser(
            self._tool_call_format(bool(tools)),
            self.reasoning_format,
            in_reasoning=in_reasoning,
            tools=tools,
            end_tokens=end_tokens,
        )

    def _tool_call_format(self, with_tools: bool) -> ToolCallFormat | None:
        return (
            self.tool_call_format
            if self.tool_call_format and (with_tools or self.tool_call_format.always)
            else None
        )


class OutputParser:
    """Makes deltas of one answer. What they are together does not depend on how its text was cut.

    Text that is not what it seemed to be, such as a call without a name, is content; nothing but
    markers and the white space beside them is lost. A delta is given as early as it is certain, and
    never taken back. Takes linear time.
    """

    def __init__(
        self,
        tool_call_format: ToolCallFormat | None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Tool] = (),
        end_tokens: Iterable[str] = (),
    ) -> None:
        """`inside`: the prompt ended within reasoning. `end_tokens`: texts of tokens that may end
        the answer, if they are left in it.
        """
        self._writer = DeltaWriter(
            tool_call_format.new_id if tool_call_format else random_id,
            holds_space=tool_call_format is not None,
        )
        self._stages = [
            stage
            for stage in (
                self._reasoning_stage(reasoning_format, in_reasoning),
                self._output_stage(tool_call_format, tools),
            )
            if stage
        ]
        self._end_tokens = EndTokenFilter(tuple(end_tokens))

    def push(self, text: str) -> list[Delta]:
        """The next piece of the answer's text; returns what is certain by it."""
        self._pass_on(self._end_tokens.push(text))
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """The text has ended; returns all that was held back."""
        self._pass_on(self._end_tokens.finish())
        for stage in self._stages:
            stage.finish()
        self._writer.finish()
        return self._writer.take()

    def _pass_on(self, text: str) -> None:
        """Give text to the first stage that reads it."""
        if text:
            self._stages[0].push(text)

    def _reasoning_stage(
        self, reasoning_format: ReasoningFormat | None, in_reasoning: bool
    ) -> "_Stage | None":
        if reasoning_format is None:
            return None
        reader = TextReader()
        return _Stage(
            reader,
            split_reasoning(
                reasoning_format,
                in_reasoning,
                reader,
                self._writer,
                lambda text: self._stages[-1].push(text),
            ),
        )

    def _output_stage(
        self, tool_call_format: ToolCallFormat | None, tools: Sequence[Tool]
    ) -> "_Stage":
        reader = OutputReader(self._writer, {tool.name: tool for tool in tools})
        return _Stage(
            reader, tool_call_format.reader(reader) if tool_call_format else _content(reader)
        )


class _Stage:
    """A reader and the generator that reads from it."""

    def __init__(self, reader: TextReader, steps: Steps[None]) -> None:
        self._reader = reader
        self._steps = steps

    def push(self, text: str) -> None:
        if text:
            self._reader.push(text)
            next(self._steps)

    def finish(self) -> None:
        self._reader.ended = True
        with suppress(StopIteration):
            next(self._steps)


def _content(reader: OutputReader) -> Steps[None]:
    """Without tools all is content."""
    yield from reader.until((), reader.writer.content)
