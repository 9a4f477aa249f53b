"""Answers as chat completions of OpenAI's API have them."""

from collections.abc import Iterable
from typing import Any

from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


def chat_delta(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chunk. A call begins with index, id, type and name, and goes on with index
    and arguments alone.
    """
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning": delta.text}
    if isinstance(delta, ToolCallStart):
        return {"tool_calls": [{"index": delta.index} | _call(delta)]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class ChatMessageBuilder:
    """A whole message, as it grows."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallStart] = []
        self._arguments: list[list[str]] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take some deltas."""
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallArguments):
                self._arguments[delta.index].append(delta.text)
            else:
                self._calls.append(delta)
                self._arguments.append([])

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun."""
        return bool(self._calls)

    def as_json(self) -> dict[str, Any]:
        """The message; its content is null where there is nothing but calls or reasoning."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._calls or self._reasoning else ""),
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                _call(call, "".join(texts))
                for call, texts in zip(self._calls, self._arguments, strict=True)
            ]
        return message


def chat_finish_reason(reason: str | None, has_tool_calls: bool) -> str | None:
    """The finish reason of an answer: `tool_calls` where it ended by itself and has calls."""
    return "tool_calls" if reason == "stop" and has_tool_calls else reason


def _call(call: ToolCallStart, arguments: str = "") -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
