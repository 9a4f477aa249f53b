"""Brings the messages of all chat interfaces into one form.

`LLM`, `AsyncLLM`, the command line, batches and all routes of the server use it. Roles and
contents that depend on the chat template are adapted in the process that renders it
(`checkpoint/template_needs.py`).

Earlier turns are read leniently, because a client sends them again with each request: an error
there would end the conversation for good. They are mended, with a note in the log.
"""

import dataclasses
import json
import logging
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from headrace.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ASKED = ("system", "developer", "user")
"""Roles of what a client asks. Other messages are earlier results, which it only sends again."""
_ROLES = "system, user, assistant or tool"
_VOLATILE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A first line of the system prompt of Claude Code, with a number that changes in every request.
Without the line, the prefix cache knows the rest of the prompt."""
_log = logging.getLogger("headrace.messages")


class MessageError(RequestError):
    """A field of a message is malformed, or a text model cannot read it. Exit code 2."""

    def __init__(self, field: str, reason: str, *, is_unsupported: bool = False) -> None:
        """`field` is the path of the field, such as `messages[0].content`."""
        super().__init__(f"{field} {reason}")
        self.field = field
        self.is_unsupported = is_unsupported


def note_mended(note: str) -> None:
    """Log a change of a conversation, without any of its text."""
    _log.info("%s", note)


def is_message(value: object) -> bool:
    """Return whether the value is a dictionary, a dataclass or an object with `model_dump`."""
    is_object = dataclasses.is_dataclass(value) or callable(getattr(value, "model_dump", None))
    return isinstance(value, Mapping) or (is_object and not isinstance(value, type))


def normalise_messages(
    messages: Sequence[Any], places: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Convert messages to dictionaries of JSON types, each with a role.

    Keys with None are dropped, as in Hugging Face transformers 5. Content is text or a list of
    text parts, and arguments of tool calls are JSON text or an object. `places` names the
    messages in errors; the default is `messages[0]` and so on. Raises MessageError.
    """
    if places is None:
        places = [f"messages[{i}]" for i in range(len(messages))]
    return [_message(message, place) for message, place in zip(messages, places, strict=True)]


def plain(value: Any, field: str) -> Any:
    """Convert to JSON types: dictionaries, lists, text, numbers, true, false and None.

    Raises MessageError for other types and for deep nesting.
    """
    try:
        return _plain(value, field)
    except RecursionError:
        raise MessageError(field, "is nested too deep; send a flatter value") from None


def text_of_part(part: Any, field: str) -> str:
    """Return the text of a content part. Raises MessageError if the part has no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(field, f"must be a part with a type, not {type(part).__name__}")
    kind = part.get("type", "text")
    if kind not in (*TEXT_PARTS, "refusal"):
        raise MessageError(
            field,
            f"has type {reprlib.repr(kind)}, but this model reads only text; leave the part out",
            is_unsupported=True,
        )
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise MessageError(f"{field}.{name}", f"must be text, not {reprlib.repr(text)}")
    return text


def _plain(value: Any, field: str) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    mapping = _as_mapping(value)
    if mapping is not None:
        return {str(key): _plain(item, f"{field}.{key}") for key, item in mapping.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return _plain(value.item(), field)  # a NumPy scalar
    raise MessageError(field, f"must be JSON, and {type(value).__name__} is not a JSON type")


def _as_mapping(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping) or not is_message(value):
        return value if isinstance(value, Mapping) else None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dumped = value.model_dump()
    return dumped if isinstance(dumped, Mapping) else None


def _message(given: Any, place: str) -> dict[str, Any]:
    fields = plain(given, place)
    if not isinstance(fields, dict):
        raise MessageError(place, f"must be a message, not {type(given).__name__}")
    message = _without_none(fields)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        reason = "is missing" if role is None else f"must be text, not {reprlib.repr(role)}"
        raise MessageError(f"{place}.role", f"{reason}; use {_ROLES}")
    _convert_tool_calls(message, place)
    _convert_content(message, f"{place}.content")
    if role in ("system", "developer"):
        _drop_volatile_line(message)
    _name_reasoning(message)
    return message


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _convert_tool_calls(message: dict[str, Any], place: str) -> None:
    calls = message.pop("tool_calls", [])
    old_call = message.pop("function_call", None)
    if not isinstance(calls, list):
        raise MessageError(f"{place}.tool_calls", f"must be a list, not {reprlib.repr(calls)}")
    converted = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if old_call is not None and not converted:
        # OpenAI's first form, with one call in a message.
        converted = [_tool_call({"function": old_call}, place, "function_call")]
    if converted:
        message["tool_calls"] = converted


def _tool_call(call: Any, field: str, name: str = "function") -> dict[str, Any]:
    if isinstance(call, dict) and "function" not in call and "name" in call:
        own = ("id", "type")
        fields = {key: value for key, value in call.items() if key not in own}
        call = {key: call[key] for key in own if key in call} | {"function": fields}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(field, f"must have a {name} with a name")
    function = _without_none(function)
    arguments = _arguments(function.get("arguments", {}), f"{field}.{name}.arguments")
    return (
        {"type": "function"}
        | _without_none(call)
        | {"function": function | {"arguments": arguments}}
    )


def _arguments(given: Any, field: str) -> str | dict[str, Any]:
    """Return an object or its JSON text; other values become the empty object, as in vLLM.

    Models write malformed arguments, and `max_tokens` cuts them.
    """
    if isinstance(given, str):
        if not given.strip():
            return "{}"
        try:
            value = json.loads(given)
            # Some clients encode the text of the arguments once more.
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            value = None
    else:
        value = given
    if not isinstance(value, dict):
        note_mended(f"{field} is not a JSON object, and becomes {{}}")
        return {}
    finite: dict[str, Any] = _finite(value)
    if finite != value:
        note_mended(f"{field} has numbers that JSON lacks, and they become null")
        return finite
    return given if isinstance(given, str) and given.lstrip().startswith("{") else value


def _finite(value: Any) -> Any:
    """Return a JSON value with None for NaN and the infinities."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _convert_content(message: dict[str, Any], field: str) -> None:
    content = message.get("content")
    refusal = message.pop("refusal", None)
    if content is None and isinstance(refusal, str):
        content = refusal
    if message["role"] not in _ASKED and _is_other_json(content, message["role"]):
        note_mended(f"{field} is neither text nor a list of parts, and becomes its JSON")
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, list):
        thoughts = [part for part in content if _is_thinking(part)]
        read = text_of_part if message["role"] in _ASKED else _replayed_text
        content = [
            {"type": "text", "text": read(part, f"{field}[{i}]")}
            for i, part in enumerate(content)
            if not _is_thinking(part)
        ]
        if thoughts and not any(name in message for name in _REASONING):
            text = "\n".join(_thinking_text(part.get("thinking")) for part in thoughts)
            message["reasoning_content"] = text
    elif isinstance(content, dict):
        if message["role"] in _ASKED:
            raise MessageError(field, "must be text or a list of parts, not an object")
    elif content is None:
        if "tool_calls" in message:
            return
        content = ""
    elif not isinstance(content, str):
        raise MessageError(field, f"must be text or a list of parts, not {type(content).__name__}")
    message["content"] = content or ""


def _drop_volatile_line(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        found = _VOLATILE.match(content)
        message["content"] = content[found.end() :] if found else content
    elif content and (found := _VOLATILE.match(content[0]["text"])):
        rest = content[0]["text"][found.end() :]
        message["content"] = ([content[0] | {"text": rest}] if rest else []) + content[1:]


def _replayed_text(part: Any, field: str) -> str:
    """Return the text of a part, or a line that takes the place of an image or the like."""
    try:
        return text_of_part(part, field)
    except MessageError as error:
        if not error.is_unsupported:
            raise
        note_mended(f"{error.args[0]}: a line of text takes its place")
        return f"[{str(part['type'])[:64]} left out: this model reads only text]"


def _is_other_json(content: Any, role: str) -> bool:
    """Whether an earlier result is JSON in a form that messages lack, such as a tool's list."""
    if isinstance(content, dict):
        return role != "tool"  # some templates read a tool's object
    if isinstance(content, list):
        return not all(
            isinstance(part, str) or (isinstance(part, dict) and ("type" in part or "text" in part))
            for part in content
        )
    return isinstance(content, bool | int | float)


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _thinking_text(thinking: Any) -> str:
    """Return the text of a part's reasoning; Mistral's API has a list of parts there."""
    if not isinstance(thinking, list):
        return str(thinking or "")
    texts = [part.get("text") if isinstance(part, dict) else part for part in thinking]
    return "".join(text for text in texts if isinstance(text, str))


def _name_reasoning(message: dict[str, Any]) -> None:
    """Put the reasoning under each name that templates read, as transformers does."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message.setdefault("thinking", reasoning)
        message["reasoning_content"] = reasoning
