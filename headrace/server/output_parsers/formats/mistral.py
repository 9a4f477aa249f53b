"""Tool calls after `[TOOL_CALLS]`: Mistral.

From the oldest format to the newest: `[{...}]`, `name[CALL_ID]id[ARGS]{...}`, `name[ARGS]{...}`.
"""

import re
import secrets
import string
from collections.abc import Sequence

from headrace.server.output_parsers.formats.json_calls import list_grammar, read_list
from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat
from headrace.server.output_parsers.tools import Tool

_OPENER = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_WORD = re.compile(r"[A-Za-z0-9_.\-]*")
_ID_CHARACTERS = string.ascii_letters + string.digits


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        return (yield from read_list(reader))
    name = yield from reader.word(_WORD)
    call_id = (yield from reader.word(_WORD)) if (yield from reader.next_is(_CALL_ID)) else ""
    yield from reader.next_is(_ARGUMENTS)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise MalformedError
    reader.start_call(name, call_id)
    yield from reader.value(reader.arguments)


def _list(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return list_grammar(lark, tools, parallel, _OPENER, "")


def _with_id(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    between = f"{lark.text(_CALL_ID)} {lark.rule('/[A-Za-z0-9]{9}/')} {lark.text(_ARGUMENTS)}"
    return _named(lark, tools, parallel, between)


def _without_id(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    return _named(lark, tools, parallel, lark.text(_ARGUMENTS))


def _named(lark: LarkGrammar, tools: Sequence[Tool], parallel: bool, between: str) -> str:
    call = lark.either(
        f"{lark.text(_OPENER + tool.name)} {between} {lark.json(tool.parameters)}" for tool in tools
    )
    return lark.repeated(call, "", parallel)


LIST = ToolCallFormat(name="mistral", openers=(_OPENER,), read=_read, grammar=_list, new_id=_new_id)
WITH_ID = ToolCallFormat(
    name="mistral_v11",
    openers=(_OPENER,),
    read=_read,
    grammar=_with_id,
    markers=(_CALL_ID, _ARGUMENTS),
    new_id=_new_id,
)
WITHOUT_ID = ToolCallFormat(
    name="mistral_v13",
    openers=(_OPENER,),
    read=_read,
    grammar=_without_id,
    markers=(_CALL_ID, _ARGUMENTS),
    new_id=_new_id,
)
