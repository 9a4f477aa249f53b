"""Calls as JSON objects, which many formats have within different markers."""

import json
from collections.abc import Sequence

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import MalformedError, Steps
from headrace.server.output_parsers.tools import Tool

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def read_call(answer: AnswerReader, known_only: bool = False) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`, in any order and with further keys; no arguments
    are an empty object.

    With `known_only`, it must be a tool of the request. Raises MalformedError.
    """
    call = _Call(answer, known_only)
    yield from answer.expect("{")
    while True:
        yield from answer.space()
        key = yield from answer.string()
        yield from answer.space()
        yield from answer.expect(":")
        yield from answer.space()
        if key in _NAMES and call.name is None:
            call.named((yield from answer.string()))
        elif key in _ARGUMENTS and not call.has_arguments:
            yield from call.read_arguments()
        else:
            yield from answer.value(_ignore)
        yield from answer.space()
        if not (yield from answer.next_is(",")):
            break
    yield from answer.expect("}")
    call.finish()


def read_calls(answer: AnswerReader, separator: str, known_only: bool = False) -> Steps[None]:
    """Read some calls, with `separator` and white space between them. Raises MalformedError."""
    while True:
        yield from answer.space()
        yield from read_call(answer, known_only)
        yield from answer.space()
        if not (yield from answer.next_is(separator)):
            return


def read_list(answer: AnswerReader) -> Steps[None]:
    """Read a JSON list of calls. Raises MalformedError."""
    yield from answer.expect("[")
    yield from read_calls(answer, ",")
    yield from answer.expect("]")


def call_grammar(
    lark: Lark,
    tools: Sequence[Tool],
    before: str,
    after: str,
    name: str = "name",
    arguments: str = "arguments",
) -> str:
    """A call of one of the tools."""
    return lark.either(
        f"{lark.text(before + _head(tool.name, name, arguments))} "
        f"{lark.json(tool.parameters)} {lark.text('}' + after)}"
        for tool in tools
    )


def list_grammar(
    lark: Lark,
    tools: Sequence[Tool],
    many: bool,
    before: str,
    after: str,
    name: str = "name",
    arguments: str = "arguments",
) -> str:
    """A list of calls between two texts."""
    call = call_grammar(lark, tools, "", "", name, arguments)
    return f"{lark.text(before + '[')} {lark.repeated(call, ', ', many)} {lark.text(']' + after)}"


def _head(tool: str, name: str, arguments: str) -> str:
    return f'{{"{name}": {json.dumps(tool)}, "{arguments}": '


def _ignore(_: str) -> None:
    """Drop a value that is not needed."""


class _Call:
    """One call, whose arguments wait for its name."""

    def __init__(self, answer: AnswerReader, known_only: bool) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self._answer = answer
        self._known_only = known_only
        self._waiting: list[str] = []

    def named(self, name: str) -> None:
        if self._known_only and name not in self._answer.tools:
            raise MalformedError
        self.name = name
        if self.has_arguments:
            self._begin(name)

    def read_arguments(self) -> Steps[None]:
        if (yield from self._answer.peek()) != "{":
            raise MalformedError
        self.has_arguments = True
        if self.name is None:
            yield from self._answer.value(self._waiting.append)
        else:
            self._begin(self.name)
            yield from self._answer.value(self._answer.arguments)

    def finish(self) -> None:
        if self.name is None:
            raise MalformedError
        if not self.has_arguments:
            self._waiting.append("{}")
            self._begin(self.name)

    def _begin(self, name: str) -> None:
        self._answer.begin_call(name)
        self._answer.arguments("".join(self._waiting))
