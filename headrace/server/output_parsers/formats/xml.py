"""`<function=name><parameter=key>value</parameter></function>` in a tag: Qwen3-Coder, Qwen 3.5."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.server.output_parsers.formats.keyed import KeyedArguments, value_grammar
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_KEY = re.compile(r"[^<>\n]*")
_FUNCTION, _END = "<function=", "</function>"
_BREAK = "\n"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    if opener != _FUNCTION:
        yield from reader.space()
        yield from reader.expect(_FUNCTION)
    name = yield from reader.word(_KEY)
    yield from reader.expect(">")
    yield from reader.space()
    tag = yield from reader.one_of((_PARAMETER, _END))
    if not tag:
        raise MalformedError
    arguments = KeyedArguments(reader, name.strip())
    while tag == _PARAMETER:
        key = yield from reader.word(_KEY)
        yield from reader.expect(">")
        arguments.key(key.strip())
        yield from _value(reader, arguments)
        yield from reader.space()
        tag = yield from reader.one_of((_PARAMETER, _END))
    if not tag:
        raise MalformedError
    arguments.end()
    yield from reader.space()
    yield from reader.closing("</tool_call>")


def _value(reader: OutputReader, arguments: KeyedArguments) -> Steps[None]:
    yield from reader.next_is("\n")
    line_break: list[str] = []

    def take(text: str) -> None:
        if text:
            arguments.text("".join(line_break) + text.removesuffix("\n"))
            line_break[:] = ["\n"] if text.endswith("\n") else []

    if not (yield from reader.until((_PARAMETER_END,), take)):
        arguments.cut()
        raise MalformedError
    arguments.end_value()


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return lark.repeated(lark.either(_call_grammar(lark, tool) for tool in tools), "\n", parallel)


def _call_grammar(lark: LarkGrammar, tool: Tool) -> str:
    def argument(key: str, schema: Mapping[str, Any]) -> str:
        before = lark.text(f"{_PARAMETER}{key}>\n")
        return f"{before} {value_grammar(lark, tool, key, schema, after)}"

    head, after, tail = (
        f"<tool_call>\n{_FUNCTION}{tool.name}>\n",
        f"\n{_PARAMETER_END}\n",
        f"{_END}\n</tool_call>",
    )
    return f"{lark.text(head)} {lark.arguments(tool, argument, '')} {lark.text(tail)}"


FORMAT = ToolCallFormat(
    name="qwen3_xml",
    openers=("<tool_call>", _FUNCTION),
    read=_read,
    grammar=_grammar,
    markers=("</tool_call>", _END, _PARAMETER, _PARAMETER_END),
)
