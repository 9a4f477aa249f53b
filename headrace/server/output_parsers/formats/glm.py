"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and
later.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.formats.keyed import KeyedArguments, value_grammar
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import MalformedError, Steps
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool

_NAME = re.compile(r"[^<>\n{]*")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(answer: AnswerReader, opener: str) -> Steps[None]:
    """Read one call."""
    yield from answer.space()
    name = yield from answer.word(_NAME)
    yield from answer.space()
    tag = yield from answer.one_of((_KEY, _END))
    if not tag:
        raise MalformedError
    arguments = KeyedArguments(answer, name.strip())
    while tag == _KEY:
        key = yield from answer.word(_NAME)
        yield from answer.expect(_KEY_END)
        yield from answer.space()
        yield from answer.expect(_VALUE)
        arguments.key(key.strip())
        if not (yield from answer.until((_VALUE_END,), arguments.text)):
            arguments.cut()
            raise MalformedError
        arguments.end_value()
        yield from answer.space()
        tag = yield from answer.one_of((_KEY, _END))
    if not tag:
        raise MalformedError
    arguments.end()


def _grammar(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    return lark.repeated(lark.either(_call_grammar(lark, tool) for tool in tools), "\n", many)


def _call_grammar(lark: Lark, tool: Tool) -> str:
    def argument(key: str, schema: Mapping[str, Any]) -> str:
        before = lark.text(f"{_KEY}{key}{_KEY_END}\n{_VALUE}")
        return f"{before} {value_grammar(lark, tool, key, schema, _VALUE_END)} {line_break}"

    line_break = lark.text("\n")
    return (
        f"{lark.text(_BEGIN + tool.name)} {line_break} {lark.arguments(tool, argument, '')} "
        f"{lark.text(_END)}"
    )


FORMAT = ToolFormat(
    "glm45", (_BEGIN,), _read, _grammar, markers=(_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
)
