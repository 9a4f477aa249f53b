"""OpenAI's own client."""

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
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "planet", "schema": SCHEMA, "strict": True},
}


def chat() -> str:
    answer = client.chat.completions.create(**ASKED)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer.choices[0].message.content


def stream() -> str:
    chunks = list(
        client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.completion_tokens <= LENGTH and chunks[-2].choices[0].finish_reason in (
        "stop",
        "length",
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools() -> None:
    caller = openai.OpenAI(base_url=CALLER_URL, api_key=KEY)
    asked = {"model": CALLER, "messages": MESSAGES, "tools": [TOOL]}
    message = caller.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CALLED)
    with caller.chat.completions.stream(**asked) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == CALLED
    told = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert (
        caller.chat.completions.create(**asked | {"messages": told}).choices[0].message.content
        == REPLY
    )


def schema() -> str:
    return planet(
        client.chat.completions.create(**ASKED, response_format=FORMAT).choices[0].message.content
    )


def several() -> str:
    answer = client.chat.completions.create(**ASKED | {"temperature": 1}, seed=5, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    return json.dumps([choice.message.content for choice in answer.choices])


def logprobs() -> str:
    content = (
        client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert all(
        len(one.top_logprobs) == 2 and one.logprob == one.top_logprobs[0].logprob for one in content
    )
    return json.dumps([one.logprob for one in content])


def wrong_key() -> None:
    stranger = openai.OpenAI(base_url=URL, api_key="wrong")
    assert raised(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"


def unknown_model() -> None:
    error = raised(
        openai.NotFoundError, lambda: client.chat.completions.create(**ASKED | {"model": "other"})
    )
    assert error.code == "model_not_found"


def too_long() -> None:
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**ASKED | {"max_tokens": TOO_LONG}),
    )
    assert error.code == "context_length_exceeded"


def full_for_a_moment() -> str:
    patient = openai.OpenAI(base_url=NARROW_URL, api_key=KEY)
    with full() as refused:
        answer = patient.chat.completions.create(**ASKED)
        assert refused() > 0
    return answer.choices[0].message.content


def out_of_time() -> None:
    hasty = openai.OpenAI(base_url=HASTY_URL, api_key=KEY)
    with asked_once():
        asked = ASKED | {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
        assert (
            raised(
                openai.InternalServerError, lambda: hasty.chat.completions.create(**asked)
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
