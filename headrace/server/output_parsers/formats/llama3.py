"""`{"name": ..., "parameters": {...}}` as the complete output or after a tag: Llama 3."""

from collections.abc import Sequence

from headrace.server.output_parsers.formats.json_calls import call_grammar, read_calls
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    """Without a tag, the name must be a known tool's: otherwise any JSON could be a call."""
    yield from read_calls(reader, ";", known_only=not opener)


def _grammar(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return lark.repeated(call_grammar(lark, tools, "", "", arguments="parameters"), "; ", parallel)


FORMAT = ToolCallFormat(
    name="llama3_json", openers=("<|python_tag|>",), read=_read, grammar=_grammar, bare="{"
)
