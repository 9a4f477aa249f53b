"""Turns of agents that use plain chat completions with tools in text, as Cline and aider do."""

from typing import Any

import pytest

from tests.server.running import Running

SYSTEM = {"role": "system", "content": "Answer with <read_file> or <attempt_completion>. " * 3}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def turn(server: Running, messages: list[Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text and usage of a streamed turn."""
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = server.post("/v1/chat/completions", body | fields)
    assert reply.status == 200, reply.body
    *chunks, last, done = reply.events
    assert done == "[DONE]" and last["choices"] == []
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return text, last["usage"]


@pytest.mark.parametrize("in_parts", [False, True])
def test_later_turns_reuse_the_earlier_ones(server: Running, in_parts: bool) -> None:
    task, details = "<task>\nRename f.\n</task>", f"<environment_details>\n{in_parts}\n# Files"
    content: Any = [part(task), part(details)] if in_parts else task + details
    messages: list[Any] = [SYSTEM, {"role": "user", "content": content}]
    text, usage = turn(server, messages)
    assert text and usage["completion_tokens"] == 8

    messages += [
        {"role": "assistant", "content": [part(text)] if in_parts else text},
        {"role": "user", "content": [part("[read_file] Result:"), part("def f(): ...")]},
        {"role": "user", "content": "Go on."},  # aider sends several in a row
    ]
    again, later = turn(server, messages, reasoning_effort="low")
    assert again and later["prompt_tokens"] > usage["prompt_tokens"]
    assert later["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 32
