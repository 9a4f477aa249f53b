"""Anthropic's client library."""

import anthropic
from checks import (
    CALLED,
    CALLER,
    CALLER_URL,
    ENDLESS,
    FUNCTION,
    HASTY_URL,
    KEY,
    LENGTH,
    MESSAGES,
    MODEL,
    NARROW_URL,
    PARAMETERS,
    REPLY,
    TOO_LONG,
    URL,
    asked_once,
    full,
    raised,
    run,
)

REQUEST = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": LENGTH,
    "extra_body": {"temperature": 0},
}
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": PARAMETERS,
}


def client_of(url: str, key: str = KEY) -> anthropic.Anthropic:
    """The client adds `/v1` to its base URL."""
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)


client = client_of(URL)


def chat() -> str:
    return client.messages.create(**REQUEST).content[0].text


def stream() -> str:
    with client.messages.stream(**REQUEST) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().content[
            0
        ].text == text and events.get_final_message().stop_reason in ("max_tokens", "end_turn")
    return text


def tools() -> None:
    caller = client_of(CALLER_URL)
    request = {"model": CALLER, "messages": MESSAGES, "max_tokens": 200, "tools": [TOOL]}
    response = caller.messages.create(**request)
    (call,) = response.content
    assert (response.stop_reason, call.name, call.input) == ("tool_use", "weather", CALLED)
    with caller.messages.stream(**request) as events:
        assert events.get_final_message().content[0].input == CALLED
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    with_result = [
        *MESSAGES,
        {"role": "assistant", "content": response.content},
        {"role": "user", "content": [result]},
    ]
    assert caller.messages.create(**request | {"messages": with_result}).content[0].text == REPLY


def wrong_key() -> None:
    error = raised(
        anthropic.AuthenticationError, lambda: client_of(URL, "wrong").messages.create(**REQUEST)
    )
    assert error.body["error"]["type"] == "authentication_error"


def unknown_model() -> None:
    error = raised(
        anthropic.NotFoundError, lambda: client.messages.create(**REQUEST | {"model": "other"})
    )
    assert error.body["error"]["type"] == "not_found_error"


def too_long() -> None:
    error = raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(**REQUEST | {"max_tokens": TOO_LONG, "stream": True}),
    )
    assert error.body["error"]["type"] == "invalid_request_error"


def full_for_a_moment() -> str:
    with full() as refused:
        response = client_of(NARROW_URL).messages.create(**REQUEST)
        assert refused() > 0
    return response.content[0].text


def out_of_time() -> None:
    request = REQUEST | {
        "max_tokens": ENDLESS,
        "messages": [{"role": "user", "content": "Count from one to a million: one, two, three,"}],
    }
    with asked_once():
        error = raised(
            anthropic.APIStatusError,
            lambda: client_of(HASTY_URL).messages.create(**request, timeout=60),
        )
        assert error.status_code == 504


run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "wrong key": wrong_key,
        "unknown model": unknown_model,
        "too long": too_long,
        "full, then not": full_for_a_moment,
        "out of time": out_of_time,
    }
)
