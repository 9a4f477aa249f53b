"""OpenAI's and Anthropic's own clients against a server of the default model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from headrace import LLM, SamplingParams
from tests.server.running import Running, running
from tests.server.tool_calling_model import REPLY, write_caller_gguf

MESSAGES = [{"role": "user", "content": "Name the planets of the solar system."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def default() -> Iterator[Running]:
    yield from running("smollm2", "--max-model-len", "512", "--kv-blocks", "64", "--api-key", "key")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from running(
        str(write_caller_gguf(tmp_path_factory.mktemp("caller") / "caller.gguf")),
        "--threads",
        "1",
        "--kv-blocks",
        "64",
    )


@pytest.fixture(scope="module")
def client(default: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{default.port}/v1", api_key="key", max_retries=0
    ) as client:
        yield client


def test_openai_client_chat_and_stream(client: openai.OpenAI) -> None:
    options = {
        "model": "smollm2",
        "messages": MESSAGES,
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 3,
    }
    response = client.chat.completions.create(**options)  # type: ignore[call-overload]
    with LLM(max_model_len=512, kv_blocks=64) as llm:
        (expected,) = llm.chat(MESSAGES, SamplingParams(max_tokens=40, temperature=0.8, seed=3))
    assert response.choices[0].message.content == expected.outputs[0].text
    assert response.usage.completion_tokens == len(expected.outputs[0].token_ids)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )  # type: ignore[call-overload]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == expected.outputs[0].text
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == response.usage.total_tokens
    scored = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    spelt = b"".join(bytes(item.bytes) for item in scored.choices[0].logprobs.content).decode()
    assert spelt.removesuffix("<|im_end|>") == expected.outputs[0].text


def test_openai_client_other_routes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"] and client.models.retrieve(
        "smollm2"
    ).id == "smollm2"
    completion = client.completions.create(
        model="smollm2",
        prompt=["One, two,", "Red, green,"],
        max_tokens=4,
        n=2,
        temperature=1,
        seed=1,
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    embedding = client.embeddings.create(
        model="smollm2", input=["one", "two"]
    )  # the client requests base64
    assert len(embedding.data) == 2 and len(embedding.data[0].embedding) == 576


def test_openai_client_errors(default: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=5000)  # type: ignore[arg-type]
    assert long.value.code == "context_length_exceeded"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=client.base_url, api_key="wrong") as stranger,
    ):
        stranger.models.list()


def test_openai_client_responses_api(client: openai.OpenAI) -> None:
    options = {
        "model": "smollm2",
        "input": "Name a planet.",
        "max_output_tokens": 300,
        "temperature": 0,
    }
    response = client.responses.create(**options)  # type: ignore[call-overload]
    expected = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name a planet."}],
        max_completion_tokens=300,
        temperature=0,
    )
    assert response.output_text == expected.choices[0].message.content
    with client.responses.stream(**options) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        assert text == stream.get_final_response().output_text == response.output_text


def test_anthropic_client_messages(default: Running, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0
    )  # type: ignore[arg-type]
    options = {
        "model": "smollm2",
        "messages": MESSAGES,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{default.port}", api_key="key", max_retries=0
    ) as claude:
        response = claude.messages.create(**options)  # type: ignore[call-overload]
        assert response.content[0].text == expected.choices[0].message.content
        with claude.messages.stream(**options) as stream:  # type: ignore[arg-type]
            assert "".join(stream.text_stream) == response.content[0].text
            assert stream.get_final_message().usage.output_tokens == response.usage.output_tokens
        count = claude.messages.count_tokens(model="smollm2", messages=MESSAGES)  # type: ignore[arg-type]
        cached = response.usage.cache_read_input_tokens or 0
        assert count.input_tokens == response.usage.input_tokens + cached
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(**options | {"model": "claude"})  # type: ignore[call-overload]


def test_openai_client_tool_call_and_result(caller: Running) -> None:
    request: dict[str, Any] = {
        "model": "caller.gguf",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    }
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{caller.port}/v1", api_key="none", max_retries=0
    ) as client:
        message = client.chat.completions.create(**request).choices[0].message
        with client.chat.completions.stream(**request) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for item in (message, streamed):
            (call,) = item.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "weather",
                {"city": "Bern"},
            )
        with_result = [
            *MESSAGES,
            message,
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        assert (
            client.chat.completions.create(**request | {"messages": with_result})
            .choices[0]
            .message.content
            == REPLY
        )


def test_anthropic_client_tool_call_and_result(caller: Running) -> None:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    request: dict[str, Any] = {
        "model": "caller.gguf",
        "messages": MESSAGES,
        "max_tokens": 100,
        "tools": tools,
    }
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{caller.port}", api_key="none", max_retries=0
    ) as claude:
        response = claude.messages.create(**request)
        with claude.messages.stream(**request) as stream:
            streamed = stream.get_final_message()
        for item in (response, streamed):
            (call,) = item.content
            assert (item.stop_reason, call.name, call.input) == (
                "tool_use",
                "weather",
                {"city": "Bern"},
            )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        with_result = [
            *MESSAGES,
            {"role": "assistant", "content": response.content},
            {"role": "user", "content": [result]},
        ]
        assert (
            claude.messages.create(**request | {"messages": with_result}).content[0].text == REPLY
        )
