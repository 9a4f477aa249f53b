"""`[f(a=1, b="x"), g()]`: tool calls in Python's syntax, bare or between markers."""

import json
import re
from collections.abc import Sequence

from headrace.server.output_parsers.formats.python_literal import read_literal
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


def _format(name: str, opener: str, closer: str, listed: bool = True) -> ToolCallFormat:
    def read(reader: OutputReader, opened: str) -> Steps[None]:
        yield from reader.space()
        if listed:
            yield from reader.expect("[")
        more = True
        while more:
            yield from reader.space()
            yield from _read_call(reader, known_only=not opened)
            gap = yield from reader.space()
            more = (
                (yield from reader.next_is(","))
                if listed
                else "\n" in gap and (yield from reader.peek()) not in ("", "<")
            )
        if listed:
            yield from reader.expect("]")
        if closer:
            yield from reader.space()
            yield from reader.closing(closer)

    def grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        before, separator, after = (
            (opener + "[", ", ", "]" + closer) if listed else (opener + "\n", "\n", "\n" + closer)
        )
        calls = lark.repeated(
            lark.either(_call_grammar(lark, tool) for tool in tools), separator, parallel
        )
        return f"{lark.text(before)} {calls} {lark.text(after)}"

    openers = (opener,) if opener else ()
    return ToolCallFormat(
        name=name,
        openers=openers,
        read=read,
        grammar=grammar,
        markers=(closer,) if closer else (),
        bare="[" if listed else "",
    )


def _read_call(reader: OutputReader, known_only: bool) -> Steps[None]:
    name = yield from reader.word(_NAME)
    if known_only and name not in reader.tools:
        raise MalformedError
    yield from reader.expect("(")
    yield from reader.space()
    if (yield from reader.next_is(")")):
        reader.start_call(name)
        reader.arguments("{}")
        return
    before = "{"
    while True:
        key = yield from reader.word(_NAME)
        yield from reader.space()
        if not key:
            raise MalformedError
        yield from reader.expect("=")
        if before == "{":
            reader.start_call(name)
        reader.arguments(f"{before}{json.dumps(key)}: ")
        yield from read_literal(reader, reader.arguments)
        yield from reader.space()
        comma = yield from reader.next_is(",")
        yield from reader.space()
        if (yield from reader.next_is(")")):
            reader.arguments("}")
            return
        if not comma:
            raise MalformedError
        before = ", "


def _call_grammar(lark: LarkGrammar, tool: Tool) -> str:
    arguments = lark.arguments(
        tool, lambda key, schema: f"{lark.text(key + '=')} {lark.json(schema)}", ", "
    )
    return f"{lark.text(tool.name + '(')} {arguments} {lark.text(')')}"


PYTHONIC = _format("pythonic", "", "")
LLAMA4 = _format("llama4_pythonic", "<|python_start|>", "<|python_end|>")
LFM2 = _format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = _format("olmo3", "<function_calls>", "</function_calls>", listed=False)
