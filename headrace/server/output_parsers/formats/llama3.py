"""`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3."""

from collections.abc import Sequence

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.formats.json_calls import call_grammar, read_calls
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import Steps
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool


def _read(answer: AnswerReader, opener: str) -> Steps[None]:
    """Read calls with semicolons between them. Without a tag any JSON may be meant, so that the
    name must be that of a tool.
    """
    yield from read_calls(answer, ";", known_only=not opener)


def _grammar(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    return lark.repeated(call_grammar(lark, tools, "", "", arguments="parameters"), "; ", many)


FORMAT = ToolFormat("llama3_json", ("<|python_tag|>",), _read, _grammar, bare="{")
