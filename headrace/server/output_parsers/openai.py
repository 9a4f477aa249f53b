"""Converts deltas to OpenAI's chat completions."""

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
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning": delta.text}
    if isinstance(delta, ToolCallStart):
        return {"tool_calls": [{"index": delta.index} | _tool_call(delta)]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class ChatMessageBuilder:
    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCallStart] = []
        self._arguments: list[list[str]] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallArguments):
                self._arguments[delta.index].append(delta.text)
            else:
                self._tool_calls.append(delta)
                self._arguments.append([])

    @property
    def has_tool_calls(self) -> bool:
        return bool(self._tool_calls)

    def as_json(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._tool_calls or self._reasoning else ""),
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [
                _tool_call(start, "".join(texts))
                for start, texts in zip(self._tool_calls, self._arguments, strict=True)
            ]
        return message


def chat_finish_reason(reason: str | None, has_tool_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_tool_calls else reason


def _tool_call(start: ToolCallStart, arguments: str = "") -> dict[str, Any]:
    return {
        "id": start.id,
        "type": "function",
        "function": {"name": start.name, "arguments": arguments},
    }
