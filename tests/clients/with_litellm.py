"""LiteLLM, which many programs and agents use."""

import json
import os
from typing import Any

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

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # otherwise it fetches prices of models from another host
)

import litellm

litellm.suppress_debug_info = True
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "planet", "schema": SCHEMA, "strict": True},
}


def ask(**more: Any) -> Any:
    """Send a request through LiteLLM's OpenAI client, or through another `provider`."""
    request = {
        "provider": "openai",
        "model": MODEL,
        "base_url": URL,
        "api_key": KEY,
        "messages": MESSAGES,
    } | more
    name = f"{request.pop('provider')}/{request.pop('model')}"
    return litellm.completion(
        model=name, **{"max_tokens": LENGTH, "temperature": 0, "max_retries": 0} | request
    )


def chat() -> str:
    response = ask()
    assert (
        response.usage.total_tokens
        == response.usage.prompt_tokens + response.usage.completion_tokens
    )
    assert (
        ask(provider="hosted_vllm").choices[0].message.content
        == response.choices[0].message.content
    )
    return response.choices[0].message.content


def stream() -> str:
    texts = []
    for provider in ("openai", "hosted_vllm"):
        chunks = list(ask(provider=provider, stream=True, stream_options={"include_usage": True}))
        assert any(getattr(chunk, "usage", None) for chunk in chunks)
        # The chunk of the usage has no choices.
        choices = [choice for chunk in chunks for choice in chunk.choices]
        texts.append("".join(choice.delta.content or "" for choice in choices))
    assert texts[0] == texts[1]
    return texts[0]


def tools() -> None:
    for provider in ("openai", "hosted_vllm"):
        request = {
            "provider": provider,
            "model": CALLER,
            "base_url": CALLER_URL,
            "tools": [TOOL],
            "max_tokens": 200,
        }
        message = ask(**request).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CALLED)
        whole = litellm.stream_chunk_builder(list(ask(**request, stream=True)))
        assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == CALLED
        with_result = [
            *MESSAGES,
            message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        assert ask(**request | {"messages": with_result}).choices[0].message.content == REPLY


def schema() -> str:
    return planet(ask(response_format=FORMAT).choices[0].message.content)


def several() -> str:
    return json.dumps(
        [choice.message.content for choice in ask(temperature=1, seed=5, n=3).choices]
    )


def logprobs() -> str:
    content = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    return json.dumps([item.logprob for item in content])


def wrong_key() -> None:
    raised(litellm.AuthenticationError, lambda: ask(api_key="wrong"))


def unknown_model() -> None:
    raised(litellm.NotFoundError, lambda: ask(model="other"))


def too_long() -> None:
    """LiteLLM raises a type of its own, so that programs can change the model."""
    raised(litellm.ContextWindowExceededError, lambda: ask(max_tokens=TOO_LONG))


def full_for_a_moment() -> str:
    with full() as refused:
        response = ask(base_url=NARROW_URL, max_retries=2)
        assert refused() > 0
    return response.choices[0].message.content


def out_of_time() -> None:
    with asked_once():
        request = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}, "max_retries": 2}
        raised(litellm.Timeout, lambda: ask(base_url=HASTY_URL, **request))


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
