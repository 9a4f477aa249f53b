"""Tool calls between control tokens: DeepSeek V3, R1 and V3.1, and Kimi K2."""

import re
from collections.abc import Sequence

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI_ALL_BEGIN, _KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_WORD = re.compile(r"[A-Za-z0-9_.:\-]*")


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    yield from reader.space()
    yield from reader.expect(_BEGIN)
    more = True
    while more:
        yield from reader.space()
        name = yield from reader.word(_WORD)
        yield from reader.space()
        yield from reader.expect(_SEPARATOR)
        yield from reader.space()
        fenced = (yield from reader.peek()) != "{"
        if fenced:  # the word before was the type
            name = yield from reader.word(_WORD)
            yield from reader.space()
            yield from reader.expect("```json")
            yield from reader.space()
        yield from _arguments(reader, name, "")
        if fenced:
            yield from reader.closing("```")
            yield from reader.space()
        yield from reader.closing(_END)
        yield from reader.space()
        more = yield from reader.next_is(_BEGIN)
    yield from reader.closing(_ALL_END)


def _read_kimi(reader: OutputReader, opener: str) -> Steps[None]:
    yield from reader.space()
    yield from reader.expect(_KIMI_BEGIN)
    more = True
    while more:
        yield from reader.space()
        call_id = yield from reader.word(_WORD)
        yield from reader.space()
        yield from reader.expect(_KIMI_ARGUMENTS)
        yield from reader.space()
        yield from _arguments(reader, call_id.removeprefix("functions.").partition(":")[0], call_id)
        yield from reader.closing(_KIMI_END)
        yield from reader.space()
        more = yield from reader.next_is(_KIMI_BEGIN)
    yield from reader.closing(_KIMI_ALL_END)


def _arguments(reader: OutputReader, name: str, call_id: str) -> Steps[None]:
    if (yield from reader.peek()) != "{":
        raise MalformedError
    reader.start_call(name, call_id)
    yield from reader.value(reader.arguments)
    yield from reader.space()


def _fenced(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return _grammar(
        lark, tools, parallel, _BEGIN + "function" + _SEPARATOR, "\n```json\n", "\n```" + _END
    )


def _plain(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return _grammar(lark, tools, parallel, _BEGIN, _SEPARATOR, _END)


def _grammar(
    lark: LarkGrammar, tools: Sequence[Tool], parallel: bool, before: str, between: str, after: str
) -> str:
    call = lark.either(
        f"{lark.text(before + tool.name + between)} {lark.json(tool.parameters)} {lark.text(after)}"
        for tool in tools
    )
    separator = "\n" if between.endswith("\n") else ""
    return (
        f"{lark.text(_ALL_BEGIN)} {lark.repeated(call, separator, parallel)} {lark.text(_ALL_END)}"
    )


def _kimi(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    number = lark.rule("/[0-9]{1,4}/")
    begin, between, end = (
        lark.text(_KIMI_BEGIN + "functions."),
        lark.text(_KIMI_ARGUMENTS),
        lark.text(_KIMI_END),
    )
    call = lark.either(
        f"{begin} {lark.text(f'{tool.name}:')} {number} {between} "
        f"{lark.json(tool.parameters)} {end}"
        for tool in tools
    )
    calls = lark.repeated(call, "", parallel)
    return f"{lark.text(_KIMI_ALL_BEGIN)} {calls} {lark.text(_KIMI_ALL_END)}"


_MARKERS = (_ALL_END, _BEGIN, _SEPARATOR, _END)
V3 = ToolCallFormat(
    name="deepseek_v3", openers=(_ALL_BEGIN,), read=_read, grammar=_fenced, markers=_MARKERS
)
V31 = ToolCallFormat(
    name="deepseek_v31", openers=(_ALL_BEGIN,), read=_read, grammar=_plain, markers=_MARKERS
)
KIMI = ToolCallFormat(
    name="kimi_k2",
    openers=(_KIMI_ALL_BEGIN,),
    read=_read_kimi,
    grammar=_kimi,
    markers=(_KIMI_ALL_END, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
)
