"""`[f(a=1, b="x"), g()]`: calls in Python's syntax, bare or between markers."""

import json
import re
from collections.abc import Sequence

from headrace.server.output_parsers.answer_reader import AnswerReader
from headrace.server.output_parsers.formats.python_literal import read_literal
from headrace.server.output_parsers.lark import Lark
from headrace.server.output_parsers.reader import MalformedError, Steps
from headrace.server.output_parsers.tool_format import ToolFormat
from headrace.server.output_parsers.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


def _format(name: str, opener: str, closer: str, listed: bool = True) -> ToolFormat:
    """`listed`: calls are in a list, and bare ones may be the whole answer; otherwise each has a
    line of its own, between markers.
    """

    def read(answer: AnswerReader, opened: str) -> Steps[None]:
        yield from answer.space()
        if listed:
            yield from answer.expect("[")
        more = True
        while more:
            yield from answer.space()
            yield from _read_call(answer, known_only=not opened)
            gap = yield from answer.space()
            more = (
                (yield from answer.next_is(","))
                if listed
                else "\n" in gap and (yield from answer.peek()) not in ("", "<")
            )
        if listed:
            yield from answer.expect("]")
        if closer:
            yield from answer.space()
            yield from answer.next_is(closer)

    def grammar(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
        before, separator, after = (
            (opener + "[", ", ", "]" + closer) if listed else (opener + "\n", "\n", "\n" + closer)
        )
        calls = lark.repeated(
            lark.either(_call_grammar(lark, tool) for tool in tools), separator, many
        )
        return f"{lark.text(before)} {calls} {lark.text(after)}"

    openers = (opener,) if opener else ()
    return ToolFormat(
        name,
        openers,
        read,
        grammar,
        markers=(closer,) if closer else (),
        bare="[" if listed else "",
    )


def _read_call(answer: AnswerReader, known_only: bool) -> Steps[None]:
    """Read `name(key=literal, ...)`; it begins with its first key. Raises MalformedError."""
    name = yield from answer.word(_NAME)
    if known_only and name not in answer.tools:
        raise MalformedError
    yield from answer.expect("(")
    yield from answer.space()
    if (yield from answer.next_is(")")):
        answer.begin_call(name)
        answer.arguments("{}")
        return
    before = "{"
    while True:
        key = yield from answer.word(_NAME)
        yield from answer.space()
        if not key:
            raise MalformedError
        yield from answer.expect("=")
        if before == "{":
            answer.begin_call(name)
        answer.arguments(f"{before}{json.dumps(key)}: ")
        yield from read_literal(answer, answer.arguments)
        yield from answer.space()
        comma = yield from answer.next_is(",")
        yield from answer.space()
        if (yield from answer.next_is(")")):
            answer.arguments("}")
            return
        if not comma:
            raise MalformedError
        before = ", "


def _call_grammar(lark: Lark, tool: Tool) -> str:
    arguments = lark.arguments(
        tool, lambda key, schema: f"{lark.text(key + '=')} {lark.json(schema)}", ", "
    )
    return f"{lark.text(tool.name + '(')} {arguments} {lark.text(')')}"


PYTHONIC = _format("pythonic", "", "")
LLAMA4 = _format("llama4_pythonic", "<|python_start|>", "<|python_end|>")
LFM2 = _format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = _format("olmo3", "<function_calls>", "</function_calls>", listed=False)
