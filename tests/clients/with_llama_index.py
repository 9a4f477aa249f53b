"""LlamaIndex's classes for servers of OpenAI's API."""

import json
from typing import Any

import openai
from checks import (
    CALLED,
    CALLER,
    CALLER_URL,
    KEY,
    LENGTH,
    MODEL,
    QUESTION,
    URL,
    Planet,
    embedded,
    planet,
    raised,
    run,
)
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

ASKED = [ChatMessage(role="user", content=QUESTION)]


def model(**more: Any) -> OpenAILike:
    own = {
        "model": MODEL,
        "api_base": URL,
        "api_key": KEY,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "temperature": 0,
        "max_tokens": LENGTH,
        "max_retries": 0,
    }
    return OpenAILike(**own | more)


def chat() -> str:
    return model().chat(ASKED).message.content


def stream() -> str:
    return "".join(piece.delta or "" for piece in model().stream_chat(ASKED))


def completion() -> str:
    text = model(is_chat_model=False).complete("Once upon a time").text
    pieces = model(is_chat_model=False).stream_complete("Once upon a time")
    assert "".join(piece.delta or "" for piece in pieces) == text
    return text


def tools() -> None:
    asked = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        asked.append({"city": city})
        return "sunny"

    caller = model(model=CALLER, api_base=CALLER_URL, max_tokens=200)
    response = caller.predict_and_call([FunctionTool.from_defaults(weather)], QUESTION)
    assert asked == [CALLED] and "sunny" in str(response)


def schema() -> None:
    found = model(max_tokens=100).as_structured_llm(Planet).complete(QUESTION)
    planet(json.dumps(json.loads(found.text)))


def embeddings() -> str:
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=KEY)
    return embedded(made.get_text_embedding(QUESTION))


def wrong_key() -> None:
    raised(openai.AuthenticationError, lambda: model(api_key="wrong").chat(ASKED))


def unknown_model() -> None:
    raised(openai.NotFoundError, lambda: model(model="other").chat(ASKED))


run(
    {
        "chat": chat,
        "stream": stream,
        "completion": completion,
        "agent with a tool": tools,
        "JSON schema as an object": schema,
        "embeddings": embeddings,
        "wrong key": wrong_key,
        "unknown model": unknown_model,
    }
)
