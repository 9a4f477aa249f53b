"""LangChain's `ChatOpenAI`."""

import json
from typing import Any

import openai
from checks import (
    CALLED,
    CALLER,
    CALLER_URL,
    ENDLESS,
    HASTY_URL,
    KEY,
    LENGTH,
    MODEL,
    NARROW_URL,
    QUESTION,
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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def model(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "base_url": URL,
            "api_key": KEY,
            "model": MODEL,
            "temperature": 0,
            "max_tokens": LENGTH,
            "max_retries": 0,
        }
        | more
    )


def chat() -> str:
    response = model().invoke(QUESTION)
    assert response.usage_metadata["output_tokens"] <= LENGTH and response.response_metadata[
        "finish_reason"
    ] in ("stop", "length")
    assert model(use_responses_api=True).invoke(QUESTION).text == response.content
    return response.content


def stream() -> str:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    )
    text = "".join(chunk.content for chunk in chunks)
    assert "".join(chunk.text for chunk in model(use_responses_api=True).stream(QUESTION)) == text
    return text


def tools() -> None:
    for responses in (False, True):
        caller = model(
            base_url=CALLER_URL, model=CALLER, max_tokens=200, use_responses_api=responses
        ).bind_tools([TOOL])
        message = caller.invoke(QUESTION)
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", CALLED)
        first, *more = caller.stream(QUESTION)
        for chunk in more:
            first += chunk
        assert first.tool_calls[0]["args"] == CALLED
        assert (
            caller.invoke(
                [HumanMessage(QUESTION), message, ToolMessage("sunny", tool_call_id=call["id"])]
            ).text
            == REPLY
        )


def schema() -> str:
    """LangChain sends strict schemas; the response equals that of OpenAI's client."""
    value = (
        model().with_structured_output(SCHEMA, method="json_schema", strict=True).invoke(QUESTION)
    )
    called = model(
        base_url=CALLER_URL, model=CALLER, max_tokens=400, seed=1
    ).with_structured_output(SCHEMA, method="function_calling")
    planet(json.dumps(called.invoke(QUESTION)))
    return planet(json.dumps(value))


def several() -> str:
    (choices,) = model(temperature=1, seed=5, n=3).generate([[HumanMessage(QUESTION)]]).generations
    return json.dumps([choice.text for choice in choices])


def logprobs() -> str:
    content = (
        model(logprobs=True, top_logprobs=2)
        .invoke(QUESTION)
        .response_metadata["logprobs"]["content"]
    )
    return json.dumps([item["logprob"] for item in content])


def wrong_key() -> None:
    raised(openai.AuthenticationError, lambda: model(api_key="wrong").invoke(QUESTION))


def unknown_model() -> None:
    raised(openai.NotFoundError, lambda: model(model="other").invoke(QUESTION))


def too_long() -> None:
    """LangChain raises a type of its own, so that programs can shorten the conversation."""
    raised(ContextOverflowError, lambda: model().invoke("water " * TOO_LONG))


def full_for_a_moment() -> str:
    with full() as refused:
        response = model(base_url=NARROW_URL, max_retries=2).invoke(QUESTION)
        assert refused() > 0
    return response.content


def out_of_time() -> None:
    hasty = model(
        base_url=HASTY_URL, max_retries=2, max_tokens=ENDLESS, extra_body={"ignore_eos": True}
    )
    with asked_once():
        raised(openai.InternalServerError, lambda: hasty.invoke(QUESTION))


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
