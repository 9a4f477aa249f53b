from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.sampling_params import ReasoningMarkers, ThinkingBudget
from headrace.server.output_parsers.delta_writer import DeltaWriter, random_id
from headrace.server.output_parsers.deltas import Content, Delta, ToolCallStart
from headrace.server.output_parsers.end_tokens import EndTokenFilter
from headrace.server.output_parsers.formats import (
    detect_tool_call_format,
    hermes,
    tool_call_format_by_name,
)
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.reasoning_formats import (
    ReasoningFormat,
    ReasoningState,
    detect_reasoning_format,
    reasoning_format_by_name,
    split_reasoning,
)
from headrace.server.output_parsers.text_reader import Steps, TextReader
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool


@dataclass(frozen=True)
class OutputFormat:
    tool_call_format: ToolCallFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    is_generic: bool = False
    """Whether the template names no format, so that calls have the one of `plain_tools.py`."""

    @classmethod
    def of(
        cls, template: str, tool_call_name: str | None = None, reasoning_name: str | None = None
    ) -> "OutputFormat":
        """Detect the formats in a chat template, or take the named ones; "none" turns one off.

        A template without a known format of tool calls gets Hermes' format. Raises
        RequestError for an unknown name.
        """
        detected = detect_tool_call_format(template)
        is_generic = detected is None and tool_call_name in (None, hermes.FORMAT.name)
        if tool_call_name is None:
            tool_call_format = detected or hermes.FORMAT
        elif tool_call_name == "none":
            tool_call_format = None
        else:
            tool_call_format = tool_call_format_by_name(tool_call_name)

        if reasoning_name is None:
            reasoning_format = detect_reasoning_format(template)
        elif reasoning_name == "none":
            reasoning_format = None
        else:
            reasoning_format = reasoning_format_by_name(reasoning_name)
        return cls(tool_call_format, reasoning_format, is_generic)

    def needs_special_tokens(self, control_tokens: Collection[str], with_tools: bool) -> bool:
        markers = list(self.reasoning_format.markers) if self.reasoning_format else []
        if tool_call_format := self._active_tool_call_format(with_tools):
            markers += (*tool_call_format.openers, *tool_call_format.markers)
        return any(marker in control_tokens for marker in markers)

    def thinking_budget(self, max_tokens: int) -> ThinkingBudget | None:
        """Return a limit of the reasoning; None if the format has no reasoning."""
        if self.reasoning_format:
            begin, end = self.reasoning_format.begin, self.reasoning_format.end
        elif self.tool_call_format and self.tool_call_format.reasoning:
            begin, end = self.tool_call_format.reasoning
        else:
            return None
        return ThinkingBudget(max_tokens=max_tokens, begin=begin, end=end)

    def reasoning_markers(self, has_begun: bool) -> ReasoningMarkers | None:
        """Return the markers of the reasoning that the parser separates; None if it does not."""
        calls, reasoning = self.tool_call_format, self.reasoning_format
        if reasoning:
            begin, end, opener = reasoning.begin, reasoning.end, reasoning.rest_begin
        elif calls and calls.reasoning:
            (begin, end), opener = calls.reasoning, calls.answer_opener
        else:
            return None
        return ReasoningMarkers(begin=begin, end=end, opener=opener, has_begun=has_begun)

    def reasoning_state(
        self, prompt: str, *, may_reason: bool = True, continued: str = ""
    ) -> ReasoningState:
        """The state of reasoning at the end of a prompt (`ReasoningFormat.state`)."""
        if self.reasoning_format is None:
            return "possible" if may_reason else "closed"
        return self.reasoning_format.state(prompt, may_reason=may_reason, continued=continued)

    def parser(
        self,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Tool] = (),
        end_tokens: Iterable[str] = (),
        parallel: bool = True,
        demanded: Collection[str] = (),
    ) -> "OutputParser":
        """Make a parser; `demanded` names the tools of which the output must call one."""
        return OutputParser(
            self._active_tool_call_format(bool(tools)),
            self.reasoning_format,
            in_reasoning=in_reasoning,
            tools=tools,
            end_tokens=end_tokens,
            parallel=parallel,
            demanded=demanded,
        )

    def _active_tool_call_format(self, with_tools: bool) -> ToolCallFormat | None:
        if with_tools or (self.tool_call_format and self.tool_call_format.always):
            return self.tool_call_format
        return None


class OutputParser:
    """Parses one output into deltas, in linear time and independent of its chunks.

    Malformed tool calls become content. A delta is never taken back.
    """

    def __init__(
        self,
        tool_call_format: ToolCallFormat | None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Tool] = (),
        end_tokens: Iterable[str] = (),
        parallel: bool = True,
        demanded: Collection[str] = (),
    ) -> None:
        """With `in_reasoning`, the prompt ends within reasoning.

        Without `parallel`, only the first call is written. If calls are `demanded`, the output has
        no content, the start of a call to the only demanded tool becomes a call, and the first
        call that repeats an earlier one ends the output.
        """
        self._demanded = tuple(demanded)
        self._has_call = self._has_cut_call = False
        self._writer = DeltaWriter(
            tool_call_format.new_id if tool_call_format else random_id,
            holds_space=tool_call_format is not None,
            max_calls=None if parallel else 1,
            ends_at_repeat=bool(demanded) and parallel,
        )
        self._end_tokens = EndTokenFilter(tuple(end_tokens))

        reader = OutputReader(self._writer, {tool.name: tool for tool in tools})
        steps = tool_call_format.read_output(reader) if tool_call_format else _content(reader)
        output_stage = _Stage(reader, steps)
        self._stages = [output_stage]
        if reasoning_format:
            first = TextReader()
            steps = split_reasoning(
                reasoning_format, in_reasoning, first, self._writer, output_stage.push
            )
            self._stages.insert(0, _Stage(first, steps))

    @property
    def has_dropped_calls(self) -> bool:
        return self._writer.is_dropping

    @property
    def has_repeated(self) -> bool:
        """Whether a demanded call equals an earlier one, so that no later text counts."""
        return self._writer.has_repeated

    def push(self, text: str) -> list[Delta]:
        self._push(self._end_tokens.push(text))
        return self._take()

    def finish(self) -> list[Delta]:
        self._push(self._end_tokens.finish())
        for stage in self._stages:
            stage.finish()
        self._writer.finish()
        deltas = self._take()
        if self._has_cut_call and not self._has_call and len(self._demanded) == 1:
            self._writer.start_call(self._demanded[0])
            deltas += self._writer.take()
        return deltas

    def _take(self) -> list[Delta]:
        deltas = self._writer.take()
        if not self._demanded:
            return deltas
        # A call that is cut before its name looks like text. The grammar allows no other text.
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        self._has_cut_call |= bool(text.strip())
        self._has_call |= any(isinstance(delta, ToolCallStart) for delta in deltas)
        return [delta for delta in deltas if not isinstance(delta, Content)]

    def _push(self, text: str) -> None:
        if text:
            self._stages[0].push(text)


class _Stage:
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
    yield from reader.until((), reader.writer.content)
