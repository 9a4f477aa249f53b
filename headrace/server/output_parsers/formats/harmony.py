"""Messages in channels: gpt-oss. All of an answer is written so, its reasoning too.

`<|channel|>analysis<|message|>...<|end|>`, `<|channel|>final<|message|>...<|return|>`, and a call
as `<|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`; the recipient may stand before the channel, and a call
in any channel.
"""

import re
from collections.abc import Callable, Sequence

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import MalformedError, Steps
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(r"[^<]*")
_RECIPIENT = "to="
_FUNCTION = "to=functions."


class _Messages:
    """The messages of one answer, which follows `<|start|>assistant`."""

    def __init__(self, answer: AnswerReader) -> None:
        self.take: Callable[[str], object] = answer.writer.content
        """What becomes of the text of the message; text outside of messages is content."""
        self._answer = answer

    def read(self) -> Steps[None]:
        """Read all of them."""
        answer = self._answer
        yield from answer.space()
        if (yield from answer.next_is(_RECIPIENT)):
            yield from answer.attempt(_RECIPIENT, self._begin(_START, _RECIPIENT))
        while marker := (
            yield from answer.until((_START, _CHANNEL, *_ENDS), lambda text: self.take(text))
        ):
            answer.writer.boundary()
            self.take = answer.writer.content
            if marker not in _ENDS:
                yield from answer.attempt(marker, self._begin(marker, ""))

    def _begin(self, marker: str, before: str) -> Steps[None]:
        """Read a header behind its first marker and `before`, and a call where the message is
        one.
        """
        channel = recipient = ""
        while marker != _MESSAGE:
            words = (before + (yield from self._answer.word(_HEADER))).split()
            before = ""
            recipient = next((word for word in words if word.startswith(_RECIPIENT)), recipient)
            if marker == _CHANNEL and words:
                channel = words[0]
            marker = yield from self._answer.one_of((_START, _CHANNEL, _CONSTRAIN, _MESSAGE))
            if not marker:
                raise MalformedError
        if self._answer.tools and recipient.startswith(_FUNCTION):
            yield from _call(self._answer, recipient.removeprefix(_FUNCTION))
        else:
            self._answer.writer.boundary(new_line=True)
            self.take = (
                self._answer.writer.reasoning
                if channel == "analysis"
                else self._answer.writer.content
            )


def _call(answer: AnswerReader, name: str) -> Steps[None]:
    yield from answer.space()
    first = yield from answer.peek()
    if first == "{":
        answer.begin_call(name)
        yield from answer.value(answer.arguments)
    elif first in ("", "<"):
        answer.begin_call(name)
        answer.arguments("{}")
    else:
        raise MalformedError


def _read(answer: AnswerReader, opener: str) -> Steps[None]:
    return (yield from _Messages(answer).read())


def _grammar(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """One call, whatever `many` says: `<|call|>` behind it ends the answer. The model may reason
    before.
    """
    reasoning = (
        f"{lark.text(_CHANNEL + 'analysis' + _MESSAGE)} {lark.up_to(_ENDS[0])} "
        f"{lark.text(_START + 'assistant')}"
    )
    heads = [
        f"{_CHANNEL}commentary {_FUNCTION}{tool.name} {_CONSTRAIN}json{_MESSAGE}" for tool in tools
    ]
    call = lark.either(
        f"{lark.text(head)} {lark.json(tool.parameters)}"
        for tool, head in zip(tools, heads, strict=True)
    )
    return f"({reasoning})? {call}"


FORMAT = ToolFormat(
    "harmony", (_CHANNEL,), _read, _grammar, (_START, _CONSTRAIN, _MESSAGE, *_ENDS), always=True
)
