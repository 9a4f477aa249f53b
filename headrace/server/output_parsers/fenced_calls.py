"""Tool calls as JSON between code fences or `<tools>` tags, or at the beginning of a line.

Models write them that a template did not teach its own markers, such as Qwen2.5-Coder. Only a
complete object that names a tool of the request is a call. Other JSON stays content.
"""

import json
import re

from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import MalformedError, Steps

FENCE, TAG, LINE = "```", "<tools>", "\n{"
OPENERS = (FENCE, TAG, LINE)
_TAG_END = "</tools>"
_LABEL = re.compile(r"[A-Za-z_]*")
_LABELS = ("", "json", "tool_call")
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")


def read_opened(reader: OutputReader, opener: str) -> Steps[None]:
    """Read calls after one of `OPENERS`. Raises MalformedError."""
    if opener == LINE:
        yield from read_objects(reader, is_open=True)
    elif opener == TAG:
        calls = yield from _read_calls(reader)
        if not (yield from reader.closing(_TAG_END)):
            raise MalformedError
        _write(reader, calls)
    else:
        yield from _read_fenced(reader)


def _read_fenced(reader: OutputReader) -> Steps[None]:
    if (yield from reader.word(_LABEL)) not in _LABELS:
        raise MalformedError
    calls = yield from _read_calls(reader)
    # The output may end without the closing fence.
    if not (yield from reader.closing(FENCE)) and (yield from reader.peek()):
        raise MalformedError
    _write(reader, calls)


def read_list(reader: OutputReader) -> Steps[None]:
    """Read a list of calls, which is the whole output. Raises MalformedError."""
    calls = yield from _read_calls(reader)
    if (yield from reader.peek()):
        raise MalformedError
    _write(reader, calls)


def read_objects(reader: OutputReader, is_open: bool = False) -> Steps[None]:
    """Read objects after each other; with `is_open`, after the first brace.

    Each is written when its line has ended. Raises MalformedError at another object, or
    at text on the same line.
    """
    while True:
        call = yield from _read_call(reader, is_open)
        space = yield from reader.space()
        following = yield from reader.peek()
        if following not in ("", "{") and "\n" not in space:
            raise MalformedError
        _write(reader, [call])
        if following != "{":
            return
        is_open = False


def _read_calls(reader: OutputReader) -> Steps[list[tuple[str, str]]]:
    """Read an object, a list of objects, or objects after each other."""
    yield from reader.space()
    is_list = yield from reader.next_is("[")
    calls = []
    while True:
        yield from reader.space()
        calls.append((yield from _read_call(reader)))
        yield from reader.space()
        if is_list:
            if not (yield from reader.next_is(",")):
                break
        elif (yield from reader.peek()) != "{":
            break
    if is_list:
        yield from reader.expect("]")
        yield from reader.space()
    return calls


def _read_call(reader: OutputReader, is_open: bool = False) -> Steps[tuple[str, str]]:
    """Return a name and its arguments. Raises MalformedError at the first other key."""
    name, arguments = None, "{}"
    if not is_open:
        yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from reader.string()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key in NAMES:
            name = yield from reader.string()
            if name not in reader.tools:
                raise MalformedError
        elif key in ARGUMENTS or key in _IGNORED:
            pieces: list[str] = []
            yield from reader.value(pieces.append)
            if key in ARGUMENTS:
                arguments = "".join(pieces)
        else:
            raise MalformedError
        yield from reader.space()
        if not (yield from reader.next_is(",")):
            break
    yield from reader.expect("}")
    if name is None or not _is_object(arguments):
        raise MalformedError
    return name, arguments


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _write(reader: OutputReader, calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        reader.start_call(name)
        reader.arguments(arguments)
    reader.writer.boundary()
