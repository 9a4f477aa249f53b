"""`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3."""

from collections.abc import Sequence

from headrace.server.output_parsers.formats.json_calls import call_grammar, read_calls
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    """Read calls with semicolons between them. Without a tag any JSON may be meant, so that the
    name must be that of a tool.
    """
    yield from read_calls(reader, ";", known_only=not opener)


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return lark.repeated(call_grammar(lark, tools, "", "", arguments="parameters"), "; ", parallel)


FORMAT = ToolCallFormat("llama3_json", ("<|python_tag|>",), _read, _grammar, bare="{")
