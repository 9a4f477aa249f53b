"""OpenAI's client library."""

import json

import openai
from checks import (
    CALLED,
    CALLER,
    CALLER_URL,
    ENDLESS,
    HASTY_URL,
    KEY,
    LENGTH,
    MESSAGES,
    MODEL,
    NARROW_URL,
    REPLY,
    SCHEMA,
    TOO_LONG,
    TOOL,
    URL,
    asked_once,
    full,
    planet,
    raised,
    run,
)

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
REQUEST = {"model": MODEL, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "planet", "schema": SCHEMA, "strict": True},
}


def chat() -> str:
    response = client.chat.completions.create(**REQUEST)
    assert (
        response.usage.total_tokens
        == response.usage.prompt_tokens + response.usage.completion_tokens
    )
    return response.choices[0].message.content


def stream() -> str:
    chunks = list(
        client.chat.completions.create(
            **REQUEST, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens <= LENGTH and chunks[-2].choices[0].finish_reason in (
        "stop",
        "length",
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools() -> None:
    caller = openai.OpenAI(base_url=CALLER_URL, api_key=KEY)
    request = {"model": CALLER, "messages": MESSAGES, "tools": [TOOL]}
    message = caller.chat.completions.create(**request).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CALLED)
    with caller.chat.completions.stream(**request) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == CALLED
    with_result = [
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert (
        caller.chat.completions.create(**request | {"messages": with_result})
        .choices[0]
        .message.content
        == REPLY
    )


def schema() -> str:
    return planet(
        client.chat.completions.create(**REQUEST, response_format=FORMAT).choices[0].message.content
    )


def several() -> str:
    response = client.chat.completions.create(**REQUEST | {"temperature": 1}, seed=5, n=3)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    return json.dumps([choice.message.content for choice in response.choices])


def logprobs() -> str:
    content = (
        client.chat.completions.create(**REQUEST, logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert all(
        len(item.top_logprobs) == 2 and item.logprob == item.top_logprobs[0].logprob
        for item in content
    )
    return json.dumps([item.logprob for item in content])


def wrong_key() -> None:
    stranger = openai.OpenAI(base_url=URL, api_key="wrong")
    assert raised(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"


def unknown_model() -> None:
    error = raised(
        openai.NotFoundError, lambda: client.chat.completions.create(**REQUEST | {"model": "other"})
    )
    assert error.code == "model_not_found"


def too_long() -> None:
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**REQUEST | {"max_tokens": TOO_LONG}),
    )
    assert error.code == "context_length_exceeded"


def full_for_a_moment() -> str:
    patient = openai.OpenAI(base_url=NARROW_URL, api_key=KEY)
    with full() as refused:
        response = patient.chat.completions.create(**REQUEST)
        assert refused() > 0
    return response.choices[0].message.content


def out_of_time() -> None:
    hasty = openai.OpenAI(base_url=HASTY_URL, api_key=KEY)
    with asked_once():
        request = REQUEST | {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
        assert (
            raised(
                openai.InternalServerError, lambda: hasty.chat.completions.create(**request)
            ).status_code
            == 504
        )


run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "JSON schema": schema,
        "n": several,
        "logprobs": logprobs,
        "wrong key": wrong_key,
        "unknown model": unknown_model,
        "too long": too_long,
        "full, then not": full_for_a_moment,
        "out of time": out_of_time,
    }
)
