"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4, SmolLM."""

from collections.abc import Sequence

from headrace.server.output_parsers.formats.json_calls import call_grammar, read_call, read_list
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from read_list(reader)
    else:
        yield from read_call(reader)
    yield from reader.space()
    yield from reader.closing("</tool_call>")


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return lark.repeated(
        call_grammar(lark, tools, "<tool_call>\n", "\n</tool_call>"), "\n", parallel
    )


FORMAT = ToolCallFormat(
    name="hermes",
    openers=("<tool_call>",),
    read=_read,
    grammar=_grammar,
    markers=("</tool_call>",),
)
