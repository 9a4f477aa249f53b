"""Fields of reasoning and the old form of tools, whole and streamed."""

import json
from typing import Any

import pytest

from tests.server.running import Running
from tests.server.test_messages_and_responses import named
from tests.server.test_tool_calls import ASK, TOOLS, tools, tools_model  # noqa: F401 - fixtures

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FUNCTIONS = [WEATHER, {"name": "time"}]


def test_thinking_token_budget(server: Running, tools: Running) -> None:  # noqa: F811
    body = ASK | {"max_tokens": 60, "ignore_eos": True, "thinking_token_budget": 20}
    body |= {"return_token_ids": True}
    free = tools.post("/v1/chat/completions", body | {"thinking_token_budget": -1}).json
    limited = tools.post("/v1/chat/completions", body).json
    (message,) = [choice["message"] for choice in limited["choices"]]
    assert free["choices"][0]["message"]["reasoning"].startswith(message["reasoning"])
    assert message["content"] and limited["usage"]["completion_tokens"] == 60
    ids = [reply["choices"][0]["token_ids"][:20] for reply in (free, limited)]
    assert ids[0] == ids[1]

    events = tools.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]

    prompt = {"prompt": limited["prompt_token_ids"]}
    reply = tools.post("/v1/completions", body | prompt).json["choices"][0]
    assert reply["token_ids"] == limited["choices"][0]["token_ids"]

    reply = server.post("/v1/chat/completions", body)  # a template without reasoning
    assert (reply.status, reply.json["error"]["param"]) == (400, "thinking_token_budget")


def test_budget_of_messages(server: Running, tools: Running) -> None:  # noqa: F811
    body = {"messages": ASK["messages"], "max_tokens": 60, "temperature": 0}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 4}}
    thinking, text = tools.post("/v1/messages", body).json["content"]
    assert (thinking["type"], text["type"]) == ("thinking", "text")
    events = named(tools.post("/v1/messages", body | {"stream": True}))
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thinking["thinking"]
    chat = tools.post("/v1/chat/completions", body).json["choices"][0]["message"]
    assert chat["reasoning"] == thinking["thinking"]
    assert server.post("/v1/messages", body).status == 200  # it has no reasoning to limit


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("disabled", False)])
def test_thinking_switches_the_template(
    tools: Running,  # noqa: F811
    kind: str,
    is_on: bool,
) -> None:
    expected = tools.post(
        "/tokenize",
        {"messages": ASK["messages"], "chat_template_kwargs": {"enable_thinking": is_on}},
    ).json["count"]
    body = {"messages": ASK["messages"], "thinking": {"type": kind}}
    count = tools.post("/v1/messages/count_tokens", body).json["input_tokens"]
    usage = tools.post("/v1/chat/completions", body | {"max_tokens": 1}).json["usage"]
    assert (count, usage["prompt_tokens"]) == (expected, expected)
    body = ASK | {"max_tokens": 1, "enable_thinking": is_on}
    usage = tools.post("/v1/chat/completions", body).json["usage"]
    assert usage["prompt_tokens"] == expected


def test_reasoning_can_be_left_out(tools: Running) -> None:  # noqa: F811
    body = ASK | {"max_tokens": 60, "ignore_eos": True, "thinking_token_budget": 9}
    plain = tools.post("/v1/chat/completions", body).json
    short = tools.post("/v1/chat/completions", body | {"include_reasoning": False}).json
    message = plain["choices"][0]["message"]
    assert message.pop("reasoning") and short["choices"][0]["message"] == message
    assert short["usage"] == plain["usage"] | short["usage"]
    events = tools.post(
        "/v1/chat/completions", body | {"include_reasoning": False, "stream": True}
    ).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert not any("reasoning" in delta for delta in deltas)

    body = {"input": "hello", "max_output_tokens": 30, "include_reasoning": False}
    (item,) = tools.post("/v1/responses", body | {"ignore_eos": True}).json["output"]
    assert (item["type"], [part["text"] for part in item["content"]]) == ("message", [""])


def test_functions_have_the_old_form(tools: Running) -> None:  # noqa: F811
    body = ASK | {"thinking_token_budget": 4}
    forms = [{"type": "function", "function": function} for function in FUNCTIONS]
    new = body | {"tools": forms, "parallel_tool_calls": False}
    old = body | {"functions": FUNCTIONS}
    choice = {"type": "function", "function": {"name": "weather"}}
    expected = tools.post("/v1/chat/completions", new | {"tool_choice": choice}).json["choices"][0]
    old |= {"function_call": {"name": "weather"}}
    found = tools.post("/v1/chat/completions", old).json["choices"][0]
    call = expected["message"]["tool_calls"][0]["function"]
    assert found["message"]["function_call"] == call and "tool_calls" not in found["message"]
    assert json.loads(call["arguments"]) == {"city": "Bern"}
    assert (found["finish_reason"], expected["finish_reason"]) == ("function_call", "tool_calls")
    events = tools.post("/v1/chat/completions", old | {"stream": True}).events[:-1]
    parts = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    assert "".join(part.get("name", "") for part in parts) == "weather"
    assert "".join(part.get("arguments", "") for part in parts) == call["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"function_call": "auto"}, "functions"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "tool_choice"),
    ],
)
def test_wrong_functions(tools: Running, more: dict[str, Any], param: str) -> None:  # noqa: F811
    reply = tools.post("/v1/chat/completions", ASK | more)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
