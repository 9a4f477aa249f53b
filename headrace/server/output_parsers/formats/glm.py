"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM from 4.5."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.server.output_parsers.formats.keyed import KeyedArguments, value_grammar
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_NAME = re.compile(r"[^<>\n{]*")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    yield from reader.space()
    name = yield from reader.word(_NAME)
    yield from reader.space()
    tag = yield from reader.one_of((_KEY, _END))
    if not tag:
        raise MalformedError
    arguments = KeyedArguments(reader, name.strip())
    while tag == _KEY:
        key = yield from reader.word(_NAME)
        yield from reader.expect(_KEY_END)
        yield from reader.space()
        yield from reader.expect(_VALUE)
        arguments.key(key.strip())
        if not (yield from reader.until((_VALUE_END,), arguments.text)):
            arguments.cut()
            raise MalformedError
        arguments.end_value()
        yield from reader.space()
        tag = yield from reader.one_of((_KEY, _END))
    if not tag:
        raise MalformedError
    arguments.end()


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return lark.repeated(lark.either(_call_grammar(lark, tool) for tool in tools), "\n", parallel)


def _call_grammar(lark: LarkGrammar, tool: Tool) -> str:
    def argument(key: str, schema: Mapping[str, Any]) -> str:
        before = lark.text(f"{_KEY}{key}{_KEY_END}\n{_VALUE}")
        return f"{before} {value_grammar(lark, tool, key, schema, _VALUE_END)} {line_break}"

    line_break = lark.text("\n")
    return (
        f"{lark.text(_BEGIN + tool.name)} {line_break} {lark.arguments(tool, argument, '')} "
        f"{lark.text(_END)}"
    )


FORMAT = ToolCallFormat(
    name="glm45",
    openers=(_BEGIN,),
    read=_read,
    grammar=_grammar,
    markers=(_END, _KEY, _KEY_END, _VALUE, _VALUE_END),
)
