"""Reads the tools, messages and content blocks of Anthropic's API as a chat.

Tools that Anthropic runs on its own servers are left out, with a note in the log. So are blocks of
earlier responses that this server does not write.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.messages import note_mended, text_of_part
from headrace.server.anthropic_records import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    CountTokensRequest,
)
from headrace.server.errors import invalid

_THINKING = ("thinking", "redacted_thinking")
_CHANGES = {"tool_addition": "is now available", "tool_removal": "is no longer available"}


class AnthropicChat:
    """The tools and messages of a request, in the form of chat completions."""

    def __init__(self, request: CountTokensRequest) -> None:
        """Convert the request. Raises ApiError and MessageError."""
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        """The field of the request that each message was made from."""
        self._tools: dict[str, dict[str, Any]] = {}

        for i, tool in enumerate(request.tools or ()):
            self._add_tool(tool, f"tools[{i}]")
        if request.system is not None:
            self._add([{"role": "system", "content": self._system(request.system)}], "system")
        for i, message in enumerate(request.messages):
            place = f"messages[{i}]"
            converted = self._chat_messages(message, place)
            if message.role == "system" and self.messages and self.messages[-1]["role"] == "user":
                # A model goes on with a prompt's last text. So the question comes last.
                self.messages[-1:-1], self.places[-1:-1] = converted, [place]
            else:
                self._add(converted, place)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return list(self._tools.values()) or None

    def _add(self, messages: list[dict[str, Any]], place: str) -> None:
        self.messages += messages
        self.places += [place] * len(messages)

    def _add_tool(self, tool: AnthropicTool, field: str) -> None:
        if tool.type not in (None, "custom"):
            note_mended(f"{field} has type {tool.type[:64]!r}, and is left out")
            return
        if tool.name is None:
            raise invalid(f"{field}.name is missing; name the function", "tools")
        if tool.name in self._tools:
            raise invalid(f"{field}.name {tool.name!r} is already used by another tool", "tools")
        function = {
            "name": tool.name,
            "description": _description(tool),
            "parameters": tool.input_schema,
            **({} if tool.strict is None else {"strict": tool.strict}),
        }
        self._tools[tool.name] = {"type": "function", "function": function}

    def _system(self, content: str | list[Block]) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        return [_part(block, f"system[{i}]") for i, block in enumerate(content)]

    def _chat_messages(self, message: AnthropicMessage, field: str) -> list[dict[str, Any]]:
        if message.content is None or isinstance(message.content, str):
            return [{"role": message.role, "content": message.content or ""}]
        results, calls, parts = [], [], []
        for i, block in enumerate(message.content):
            place = f"{field}.content[{i}]"
            if block.type == "tool_use":
                function = {"name": block.name or "", "arguments": block.input}
                calls.append({"id": block.id or "", "function": function})
            elif block.type == "tool_result":
                results.append(_result(block, place))
            elif block.type in _CHANGES:
                parts.append(_text(self._change_tool(block, place)))
            elif block.type == "redacted_thinking":
                continue
            elif message.role == "assistant" and block.type not in ("text", *_THINKING):
                note_mended(f"{place} has type {block.type[:64]!r}, and is left out")
            else:
                parts.append(_part(block, place))

        if results and not (parts or calls):
            return results
        converted: dict[str, Any] = {"role": message.role, "content": parts or ""}
        if calls:
            converted["tool_calls"] = calls
        return [*results, converted]

    def _change_tool(self, block: Block, field: str) -> str:
        """Add or remove a tool in the middle of a conversation, and return a line about it."""
        tool = block.tool if isinstance(block.tool, dict) else {}
        name = tool.get("name") or tool.get("server_name")
        if tool.get("type") == "tool_definition":
            try:
                definition = msgspec.convert(tool.get("definition"), AnthropicTool)
            except msgspec.ValidationError as error:
                raise invalid(f"{field}.tool.definition: {error}", "messages") from None
            name = definition.name
            if name not in self._tools:
                self._add_tool(definition, f"{field}.tool.definition")
        elif block.type == "tool_removal":
            self._tools.pop(str(name), None)
        return f"The tool {name} {_CHANGES[block.type]}."


def _description(tool: AnthropicTool) -> str:
    """Describe a tool with its examples: templates have no place of their own for examples."""
    description = tool.description or ""
    if not tool.input_examples:
        return description
    examples = "\n".join(json.dumps(example) for example in tool.input_examples)
    return f"{description}\n\nExamples of arguments:\n{examples}".lstrip()


def _result(block: Block, field: str) -> dict[str, Any]:
    content = block.content
    if isinstance(content, list):
        content = [_result_part(part, f"{field}.content[{i}]") for i, part in enumerate(content)]
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id or "",
        "content": "" if content is None else content,
    }


def _result_part(part: Any, field: str) -> Any:
    """Return a text part; what has no text goes on as it is, and becomes a line of text."""
    try:
        block = msgspec.convert(part, Block)
    except msgspec.ValidationError as error:
        raise invalid(f"{field}: {error}", "messages") from None
    text = _text_of_block(block)
    return msgspec.to_builtins(block) if text is None else _text(text)


def _part(block: Block, field: str) -> dict[str, Any]:
    part: dict[str, Any] = msgspec.to_builtins(block)
    if block.type in _THINKING:
        return part
    text = _text_of_block(block)
    return _text(text_of_part(part, field) if text is None else text)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text_of_block(block: Block) -> str | None:
    """Return the text of a block that is no plain text, or None if it has none."""
    title = block.title if isinstance(block.title, str) else ""
    match block.type:
        case "document":
            source = block.source if isinstance(block.source, dict) else {}
            content = source.get("data" if source.get("type") == "text" else "content")
            text = _joined(content)
            return None if text is None else _lines(title, text)
        case "search_result":
            text = _joined(block.content)
            address = block.source if isinstance(block.source, str) else ""
            return None if text is None else _lines(title, address, text)
        case "tool_reference":
            return f"The tool {block.tool_name} is available."
    return None


def _joined(content: Any) -> str | None:
    """Return text, or the text of a list of text blocks; None if other values are in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return "\n".join(found) if len(found) == len(texts) else None


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))
