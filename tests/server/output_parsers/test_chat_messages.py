"""Chunks and messages of OpenAI's chat completions."""

from typing import Any

import pytest

from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from headrace.server.output_parsers.openai import ChatMessageBuilder, chat_delta, chat_finish_reason
from tests.server.output_parsers.samples import SAMPLES, Sample, parser

CALL = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'


def streamed(sample: Sample) -> list[dict[str, Any]]:
    output_parser = parser(sample)
    return [
        chat_delta(delta)
        for piece in (*sample.text, None)
        for delta in (output_parser.finish() if piece is None else output_parser.push(piece))
    ]


def whole(*deltas: Delta) -> dict[str, Any]:
    message = ChatMessageBuilder()
    message.add(deltas)
    return message.as_json()


def test_chat_deltas() -> None:
    found = streamed(Sample("hermes", "think", "<think>a</think>b" + CALL, []))
    begun = {
        "index": 0,
        "id": "0",
        "type": "function",
        "function": {"name": "clock", "arguments": ""},
    }
    fragments = [
        {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in '{"a": 1}'
    ]
    assert found == [{"reasoning": "a"}, {"content": "b"}, {"tool_calls": [begun]}, *fragments]


@pytest.mark.parametrize("sample", SAMPLES)
def test_chat_deltas_equal_the_message(sample: Sample) -> None:
    output_parser, message = parser(sample), ChatMessageBuilder()
    message.add(output_parser.push(sample.text))
    message.add(output_parser.finish())
    content, reasoning, calls = "", "", list[Any]()
    for delta in streamed(sample):
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert (
                    call.keys() == {"index", "id", "type", "function"}
                    and call["function"]["arguments"] == ""
                )
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {
                    "arguments"
                }
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    found = message.as_json()
    assert (found["content"] or "", found.get("reasoning", ""), found.get("tool_calls", [])) == (
        content,
        reasoning,
        calls,
    )
    assert message.has_tool_calls == bool(calls)


def test_chat_message() -> None:
    frame = {"role": "assistant", "refusal": None}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert whole() == frame | {"content": ""}
    assert whole(Content("a"), Content("b")) == frame | {"content": "ab"}
    assert whole(Reasoning("a")) == frame | {"content": None, "reasoning": "a"}
    begun = (ToolCallStart(0, "x", "f"), ToolCallArguments(0, '{"a"'), ToolCallArguments(0, ": 1}"))
    assert whole(*begun) == frame | {"content": None, "tool_calls": [call]}
    assert whole(Content("a"), *begun) == frame | {"content": "a", "tool_calls": [call]}


def test_chat_finish_reason() -> None:
    assert [chat_finish_reason(reason, True) for reason in ("stop", "length", None)] == [
        "tool_calls",
        "length",
        None,
    ]
    assert [chat_finish_reason(reason, False) for reason in ("stop", "length", None)] == [
        "stop",
        "length",
        None,
    ]
