"""The channels of gpt-oss, for reasoning, content and tool calls.

Reasoning is `<|channel|>analysis<|message|>...<|end|>`, content is
`<|channel|>final<|message|>...<|return|>`, and a tool call is
`<|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`.
"""

import re
from collections.abc import Callable, Sequence

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.reasoning_formats import ReasoningState
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_REASONING = f"{_CHANNEL}analysis{_MESSAGE}"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(r"[^<]*")
_RECIPIENT = "to="
_FUNCTION = "to=functions."


class _Messages:
    """Reads messages; the prompt ends with `<|start|>assistant`."""

    def __init__(self, reader: OutputReader) -> None:
        self.take: Callable[[str], object] = reader.writer.content
        self._reader = reader

    def read(self) -> Steps[None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.next_is(_RECIPIENT)):
            yield from reader.attempt(_RECIPIENT, self._begin(_START, _RECIPIENT))
        while marker := (
            yield from reader.until((_START, _CHANNEL, *_ENDS), lambda text: self.take(text))
        ):
            reader.writer.boundary()
            self.take = reader.writer.content
            if marker not in _ENDS:
                yield from reader.attempt(marker, self._begin(marker, ""))

    def _begin(self, marker: str, before: str) -> Steps[None]:
        channel = recipient = ""
        while marker != _MESSAGE:
            words = (before + (yield from self._reader.word(_HEADER))).split()
            before = ""
            recipient = next((word for word in words if word.startswith(_RECIPIENT)), recipient)
            if marker == _CHANNEL and words:
                channel = words[0]
            marker = yield from self._reader.one_of((_START, _CHANNEL, _CONSTRAIN, _MESSAGE))
            if not marker:
                raise MalformedError
        if self._reader.tools and recipient.startswith(_FUNCTION):
            yield from _call(self._reader, recipient.removeprefix(_FUNCTION))
        else:
            self._reader.writer.boundary(new_line=True)
            self.take = (
                self._reader.writer.reasoning
                if channel == "analysis"
                else self._reader.writer.content
            )


def _call(reader: OutputReader, name: str) -> Steps[None]:
    yield from reader.space()
    first = yield from reader.peek()
    if first == "{":
        reader.start_call(name)
        yield from reader.value(reader.arguments)
    elif first in ("", "<"):
        reader.start_call(name)
        reader.arguments("{}")
    else:
        raise MalformedError


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    return (yield from _Messages(reader).read())


def _reasoning(lark: LarkGrammar) -> str:
    return f"{lark.text(_REASONING)} {lark.up_to(_ENDS[0])} {lark.text(_START + 'assistant')}"


def _envelope(lark: LarkGrammar, answer: str, reasoning: ReasoningState) -> str:
    before = "" if reasoning == "closed" else f"({_reasoning(lark)})?"
    kind = f"({lark.text(' ' + _CONSTRAIN + 'json')} | {lark.text(_CONSTRAIN + 'json')})?"
    return f"{before} {lark.text(_CHANNEL + 'final')} {kind} {lark.text(_MESSAGE)} {answer}"


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    reasoning = _reasoning(lark)
    heads = [
        f"{_CHANNEL}commentary {_FUNCTION}{tool.name} {_CONSTRAIN}json{_MESSAGE}" for tool in tools
    ]
    call = lark.either(
        f"{lark.text(head)} {lark.json(tool.parameters)}"
        for tool, head in zip(tools, heads, strict=True)
    )
    return f"({reasoning})? {call}"


FORMAT = ToolCallFormat(
    name="harmony",
    openers=(_CHANNEL,),
    read=_read,
    grammar=_grammar,
    markers=(_START, _CONSTRAIN, _MESSAGE, *_ENDS),
    envelope=_envelope,
    always=True,
    reasoning=(_REASONING, _ENDS[0]),
    answer_opener=f"{_START}assistant{_CHANNEL}final{_MESSAGE}",
)
