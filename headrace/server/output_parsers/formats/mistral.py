"""`[TOOL_CALLS][{...}]`, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` and
`[TOOL_CALLS]name[ARGS]{...}`: Mistral, older to newer.
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
    """Nine letters and digits: the templates refuse any other id when the call comes back."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def _read(reader: OutputReader, opener: str) -> Steps[None]:
    """Read calls in any of the three forms."""
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        return (yield from read_list(reader))
    name = yield from reader.word(_WORD)
    call_id = (yield from reader.word(_WORD)) if (yield from reader.next_is(_CALL_ID)) else ""
    yield from reader.next_is(_ARGUMENTS)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise MalformedError
    reader.begin_call(name, call_id)
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


LIST = ToolCallFormat("mistral", (_OPENER,), _read, _list, new_id=_new_id)
WITH_ID = ToolCallFormat(
    "mistral_v11", (_OPENER,), _read, _with_id, (_CALL_ID, _ARGUMENTS), new_id=_new_id
)
WITHOUT_ID = ToolCallFormat(
    "mistral_v13", (_OPENER,), _read, _without_id, (_CALL_ID, _ARGUMENTS), new_id=_new_id
)
