"""Messages of OpenAI's API as chat templates read them."""

import json
from typing import Any

from headrace.server.described import TEXT_KINDS
from headrace.server.errors import invalid
from headrace.server.openai_records import ChatMessage, ContentPart


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """What is not there is left out, and parts of text are one text. Raises ApiError for anything
    but text.
    """
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def text_of(
    content: str | list[ContentPart] | None, where: str, param: str = "messages"
) -> str | None:
    """The text of a content. Raises ApiError for parts that are none."""
    if not isinstance(content, list):
        return content
    for part in content:
        if part.type not in TEXT_KINDS:
            raise invalid(
                f"{where}: this model reads text only, not {part.type!r}",
                param,
                "unsupported_parameter",
            )
        if part.text is None:
            raise invalid(f"{where}: a part of type {part.type} must have a text", param)
    return "\n".join(part.text or "" for part in content)


def _message(where: str, message: ChatMessage) -> dict[str, Any]:
    content = text_of(message.content, where)
    fields: dict[str, Any] = {
        "role": message.role,
        "content": content if content is not None or message.tool_calls else "",
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.reasoning is not None:
        fields.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls is not None:
        fields["tool_calls"] = [
            call_of(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    return fields


def call_of(where: str, call: dict[str, Any], param: str = "messages") -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect: clients send them as JSON
    text. Raises ApiError.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} must have a function with a name", param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{where}.function.arguments is not JSON", param) from None
    return call | {"function": function | {"arguments": {} if arguments is None else arguments}}
