"""Converts messages of OpenAI's API for chat templates."""

import json
from typing import Any

from headrace.server.errors import invalid
from headrace.server.field_types import TEXT_KINDS
from headrace.server.openai_records import ChatMessage, ContentPart


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages. Raises ApiError for other than text."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, field: str) -> dict[str, Any]:
    content = content_text(message.content, field)
    if content is None and not message.tool_calls:
        content = ""
    converted: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            converted[name] = value
    if message.reasoning is not None:
        converted.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls is not None:
        converted["tool_calls"] = [
            template_tool_call(tool_call, f"{field}.tool_calls[{i}]")
            for i, tool_call in enumerate(message.tool_calls)
        ]
    return converted


def content_text(
    content: str | list[ContentPart] | None, field: str, param: str = "messages"
) -> str | None:
    """Join the parts of a message. Raises ApiError for other than text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if part.type not in TEXT_KINDS:
            raise invalid(
                f"{field} has type {part.type!r}, but this model reads only text",
                param,
                "unsupported_parameter",
            )
        if part.text is None:
            raise invalid(f"{field} has a part of type {part.type} without text", param)
    return "\n".join(part.text or "" for part in content)


def template_tool_call(
    tool_call: dict[str, Any], field: str, param: str = "messages"
) -> dict[str, Any]:
    """Parse the JSON arguments of a tool call, which templates read as an object."""
    function = tool_call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{field} must have a function with a name", param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{field}.function.arguments is not JSON", param) from None
    function = function | {"arguments": {} if arguments is None else arguments}
    return tool_call | {"function": function}
