import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.server.output_parsers.fenced_calls import ARGUMENTS, NAMES
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tools import Tool

_SHARED = ("$defs", "definitions", "x-guidance")
"""Keys of a schema that hold at its root alone."""


def read_call(reader: OutputReader, known_only: bool = False) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}` with keys in any order. Raises MalformedError.

    With `known_only`, the name must be a tool of the request.
    """
    call = _Call(reader, known_only)
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from reader.string()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key in NAMES and call.name is None:
            call.set_name((yield from reader.string()))
        elif key in ARGUMENTS and not call.has_arguments:
            yield from call.read_arguments()
        else:
            yield from reader.value(_ignore)
        yield from reader.space()
        if not (yield from reader.next_is(",")):
            break
    yield from reader.expect("}")
    call.finish()


def read_calls(reader: OutputReader, separator: str, known_only: bool = False) -> Steps[None]:
    while True:
        yield from reader.space()
        yield from read_call(reader, known_only)
        yield from reader.space()
        if not (yield from reader.next_is(separator)):
            return


def read_list(reader: OutputReader) -> Steps[None]:
    yield from reader.expect("[")
    yield from read_calls(reader, ",")
    yield from reader.expect("]")


def call_grammar(
    lark: LarkGrammar,
    tools: Sequence[Tool],
    before: str,
    after: str,
    name: str = "name",
    arguments: str = "arguments",
) -> str:
    if lark.has_answer and not before:
        return lark.either(lark.json(_schema(tool, name, arguments)) for tool in tools)
    return lark.either(
        f"{lark.text(before + _head(tool.name, name, arguments))} "
        f"{lark.json(tool.parameters)} {lark.text('}' + after)}"
        for tool in tools
    )


def list_grammar(
    lark: LarkGrammar,
    tools: Sequence[Tool],
    parallel: bool,
    before: str,
    after: str,
    name: str = "name",
    arguments: str = "arguments",
) -> str:
    call = call_grammar(lark, tools, "", "", name, arguments)
    return (
        f"{lark.text(before + '[')} {lark.repeated(call, ', ', parallel)} {lark.text(']' + after)}"
    )


def _schema(tool: Tool, name: str, arguments: str) -> Mapping[str, Any]:
    shared = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
    return {
        **shared,
        "type": "object",
        "properties": {name: {"const": tool.name}, arguments: tool.parameters},
        "required": [name, arguments],
        "additionalProperties": False,
    }


def _head(tool: str, name: str, arguments: str) -> str:
    return f'{{"{name}": {json.dumps(tool)}, "{arguments}": '


def _ignore(_: str) -> None:
    pass


class _Call:
    def __init__(self, reader: OutputReader, known_only: bool) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self._reader = reader
        self._known_only = known_only
        self._held: list[str] = []

    def set_name(self, name: str) -> None:
        if self._known_only and name not in self._reader.tools:
            raise MalformedError
        self.name = name
        if self.has_arguments:
            self._start(name)

    def read_arguments(self) -> Steps[None]:
        if (yield from self._reader.peek()) != "{":
            raise MalformedError
        self.has_arguments = True
        if self.name is None:
            yield from self._reader.value(self._held.append)
        else:
            self._start(self.name)
            yield from self._reader.value(self._reader.arguments)

    def finish(self) -> None:
        if self.name is None:
            raise MalformedError
        if not self.has_arguments:
            self._held.append("{}")
            self._start(self.name)

    def _start(self, name: str) -> None:
        self._reader.start_call(name)
        self._reader.arguments("".join(self._held))
