"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4,
SmolLM 2 and 3.
"""

from collections.abc import Sequence

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.formats.json_calls import call_grammar, read_call, read_list
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import Steps
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool


def _read(answer: AnswerReader, opener: str) -> Steps[None]:
    """Read a call, or a list of calls, as SmolLM2 writes them."""
    yield from answer.space()
    if (yield from answer.peek()) == "[":
        yield from read_list(answer)
    else:
        yield from read_call(answer)
    yield from answer.space()
    yield from answer.next_is("</tool_call>")


def _grammar(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    return lark.repeated(call_grammar(lark, tools, "<tool_call>\n", "\n</tool_call>"), "\n", many)


FORMAT = ToolFormat("hermes", ("<tool_call>",), _read, _grammar, markers=("</tool_call>",))
