"""pydantic-ai's agents, by chat completions and by the Responses API."""

import asyncio
from typing import Any

from checks import (
    CALLED,
    CALLER,
    CALLER_URL,
    KEY,
    LENGTH,
    MODEL,
    QUESTION,
    REPLY,
    URL,
    Planet,
    planet,
    raised,
    run,
)
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = (OpenAIChatModel, OpenAIResponsesModel)


def agent(
    kind: Any, model: str = MODEL, url: str = URL, tokens: int = LENGTH, key: str = KEY, **more: Any
) -> Any:
    provider = OpenAIProvider(base_url=url, api_key=key)
    return Agent(
        kind(model, provider=provider),
        model_settings={"temperature": 0, "max_tokens": tokens},
        **more,
    )


def chat() -> str:
    first, second = (agent(kind).run_sync(QUESTION).output for kind in KINDS)
    assert first == second
    return first


def stream() -> str:
    async def read(kind: Any) -> str:
        async with agent(kind).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    first, second = (asyncio.run(read(kind)) for kind in KINDS)
    assert first == second
    return first


def tools() -> None:
    asked = []

    def weather(city: str) -> str:
        asked.append({"city": city})
        return "sunny"

    for kind in KINDS:
        assert agent(kind, CALLER, CALLER_URL, 200, tools=[weather]).run_sync("?").output == REPLY
    assert asked == [CALLED] * len(KINDS)


def schema() -> None:
    for kind in KINDS:
        for output in (NativeOutput(Planet), ToolOutput(Planet)):
            found = agent(kind, tokens=100, output_type=output).run_sync(QUESTION).output
            planet(found.model_dump_json())


def wrong_key() -> None:
    for kind in KINDS:
        error = raised(ModelHTTPError, lambda kind=kind: agent(kind, key="wrong").run_sync("?"))
        assert error.status_code == 401


def unknown_model() -> None:
    for kind in KINDS:
        error = raised(ModelHTTPError, lambda kind=kind: agent(kind, "other").run_sync("?"))
        assert error.status_code == 404


run(
    {
        "chat": chat,
        "stream": stream,
        "agent with a tool": tools,
        "JSON schema as an object": schema,
        "wrong key": wrong_key,
        "unknown model": unknown_model,
    }
)
