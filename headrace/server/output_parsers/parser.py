"""Reads a model's answer as it comes: reasoning, content and calls of tools."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.deltas import Delta
from headrace.server.output_parsers.end_tokens import EndTokens
from headrace.server.output_parsers.formats import detect_tool_format, named_tool_format
from headrace.server.output_parsers.reader import Reader, Steps
from headrace.server.output_parsers.thinking import (
    Thinking,
    detect_thinking,
    named_thinking,
    split_thinking,
)
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool
from headrace.server.output_parsers.writer import Writer, random_id


@dataclass(frozen=True)
class AnswerStyle:
    """How a model writes its answers. One for each model, chosen at start."""

    tool_format: ToolFormat | None = None
    thinking: Thinking | None = None

    @classmethod
    def of(
        cls, template: str, tool_format: str | None = None, thinking: str | None = None
    ) -> "AnswerStyle":
        """By the text of the chat template (where there is a second one for tools, by both), or by
        names; "none" turns one off.

        Raises RequestError for an unknown name.
        """
        return cls(
            detect_tool_format(template)
            if tool_format is None
            else None
            if tool_format == "none"
            else named_tool_format(tool_format),
            detect_thinking(template)
            if thinking is None
            else None
            if thinking == "none"
            else named_thinking(thinking),
        )

    def needs_special_tokens(self, control_tokens: Collection[str], with_tools: bool) -> bool:
        """Whether the engine must leave control tokens in the text: whether a marker is one. With
        them comes the end token.
        """
        tool_format = self._format(with_tools)
        markers = () if tool_format is None else (*tool_format.openers, *tool_format.markers)
        return any(
            marker in control_tokens
            for marker in (*markers, *(self.thinking.markers if self.thinking else ()))
        )

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return self.thinking is not None and self.thinking.begins_inside(prompt)

    def parser(
        self, *, inside: bool = False, tools: Sequence[Tool] = (), end_tokens: Iterable[str] = ()
    ) -> "AnswerParser":
        """A parser for one answer. Without `tools` nothing is a call."""
        return AnswerParser(
            self._format(bool(tools)),
            self.thinking,
            inside=inside,
            tools=tools,
            end_tokens=end_tokens,
        )

    def _format(self, with_tools: bool) -> ToolFormat | None:
        return (
            self.tool_format
            if self.tool_format and (with_tools or self.tool_format.always)
            else None
        )


class AnswerParser:
    """Makes deltas of one answer. What they are together does not depend on how its text was cut.

    Text that is not what it seemed to be, such as a call without a name, is content; nothing but
    markers and the white space beside them is lost. A delta is given as early as it is certain, and
    never taken back. Takes linear time.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        thinking: Thinking | None = None,
        *,
        inside: bool = False,
        tools: Sequence[Tool] = (),
        end_tokens: Iterable[str] = (),
    ) -> None:
        """`inside`: the prompt ended within reasoning. `end_tokens`: texts of tokens that may end
        the answer, if they are left in it.
        """
        self._writer = Writer(
            tool_format.new_id if tool_format else random_id, holds_space=tool_format is not None
        )
        self._stages = [
            stage
            for stage in (self._thinking(thinking, inside), self._answer(tool_format, tools))
            if stage
        ]
        self._end_tokens = EndTokens(tuple(end_tokens))

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

    def _thinking(self, thinking: Thinking | None, inside: bool) -> "_Stage | None":
        if thinking is None:
            return None
        reader = Reader()
        return _Stage(
            reader,
            split_thinking(
                thinking, inside, reader, self._writer, lambda text: self._stages[-1].push(text)
            ),
        )

    def _answer(self, tool_format: ToolFormat | None, tools: Sequence[Tool]) -> "_Stage":
        reader = AnswerReader(self._writer, {tool.name: tool for tool in tools})
        return _Stage(reader, tool_format.answer(reader) if tool_format else _content(reader))


class _Stage:
    """A reader and the generator that reads from it."""

    def __init__(self, reader: Reader, steps: Steps[None]) -> None:
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


def _content(answer: AnswerReader) -> Steps[None]:
    """Without tools all is content."""
    yield from answer.until((), answer.writer.content)
