"""OpenAI's agents, by chat completions and by the Responses API."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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

set_tracing_disabled(True)
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def agent(
    kind: Any, model: str = MODEL, url: str = URL, tokens: int = LENGTH, **more: Any
) -> Agent:
    client = openai.AsyncOpenAI(base_url=url, api_key=more.pop("key", KEY), max_retries=0)
    return Agent(
        name="one",
        model=kind(model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=tokens),
        **more,
    )


def ask(made: Agent, question: str = QUESTION) -> Any:
    return asyncio.run(Runner.run(made, question)).final_output


def chat() -> str:
    first, second = (ask(agent(kind)) for kind in KINDS)
    assert first == second
    return first


def stream() -> str:
    async def read(kind: Any) -> str:
        result = Runner.run_streamed(agent(kind), QUESTION)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert "".join(pieces) == result.final_output
        return result.final_output

    first, second = (asyncio.run(read(kind)) for kind in KINDS)
    assert first == second
    return first


def tools() -> None:
    asked = []

    @function_tool
    def weather(city: str) -> str:
        asked.append({"city": city})
        return "sunny"

    for kind in KINDS:
        assert ask(agent(kind, CALLER, CALLER_URL, 200, tools=[weather])) == REPLY
    assert asked == [CALLED] * len(KINDS)


def schema() -> None:
    for kind in KINDS:
        planet(ask(agent(kind, tokens=100, output_type=Planet)).model_dump_json())


def wrong_key() -> None:
    for kind in KINDS:
        raised(openai.AuthenticationError, lambda kind=kind: ask(agent(kind, key="wrong")))


def unknown_model() -> None:
    for kind in KINDS:
        raised(openai.NotFoundError, lambda kind=kind: ask(agent(kind, "other")))


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
