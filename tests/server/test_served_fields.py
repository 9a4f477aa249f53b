"""Fields of vLLM, SGLang, llama.cpp and older forms that the server serves, whole and streamed."""

from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from headrace import LLM, SamplingParams
from headrace.remote.frames import StepOutput
from headrace.server.anthropic_content import AnthropicChat
from headrace.server.anthropic_records import (
    AnthropicMessage,
    AnthropicTool,
    CountTokensRequest,
)
from headrace.server.generation import StreamInterval
from headrace.server.state import Truncation
from tests.server.running import Running
from tests.server.test_messages_and_responses import named
from tests.server.test_openai_routes import CHAT, MESSAGES, TEXT, chat, complete, stream

SNOWMEN = "\N{SNOWMAN} naïve \N{SNOWMAN}"
"""The tiny model's vocabulary has their bytes alone."""


def refusal(server: Running, path: str, body: dict[str, Any]) -> tuple[int, str]:
    reply = server.post(path, body)
    return reply.status, reply.json["error"]["param"]


class TestPrompts:
    def test_prompt_token_ids(self, server: Running, llm: LLM) -> None:
        ids = llm.apply_chat_template(MESSAGES, add_generation_prompt=True)
        assert chat(server, return_token_ids=True)["prompt_token_ids"] == ids
        first, *others = stream(server, "/v1/chat/completions", CHAT | {"return_token_ids": True})
        assert first["prompt_token_ids"] == ids
        assert not any("prompt_token_ids" in chunk for chunk in others)

        ids = llm.get_tokenizer().encode("hello world")
        options = {"return_token_ids": True, "prompt": ["hello world", "w"]}
        assert complete(server, **options)["choices"][0]["prompt_token_ids"] == ids
        chunks = [
            chunk["choices"][0] for chunk in stream(server, "/v1/completions", TEXT | options)
        ]
        given = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
        assert {chunk["index"]: len(chunk["prompt_token_ids"]) for chunk in given} == {
            0: len(ids),
            1: len(llm.get_tokenizer().encode("w")),
        }

    def test_prompt_logprobs(self, server: Running, llm: LLM) -> None:
        ids = llm.get_tokenizer().encode("hello world")
        (expected,) = llm.generate(
            {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=2)
        )
        (choice,) = complete(server, prompt=ids, prompt_logprobs=2)["choices"]
        assert expected.prompt_logprobs and choice["prompt_logprobs"][0] is None
        for token, found, score in zip(
            ids[1:], choice["prompt_logprobs"][1:], expected.prompt_logprobs[1:], strict=True
        ):
            assert score and found[str(token)]["logprob"] == score[token].logprob
            assert {int(other) for other in found} == set(score)
        body = chat(server, prompt_logprobs=1, return_token_ids=True)
        assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
        for path, base in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            body = base | {"prompt_logprobs": 1, "stream": True}
            assert refusal(server, path, body) == (400, "prompt_logprobs")

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({"truncate_prompt_tokens": 2}, slice(-2, None)),
            ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, slice(0, 2)),
            ({"truncate_prompt_tokens": 900}, slice(0, None)),
            ({"truncate_prompt_tokens": -1}, slice(0, None)),
        ],
    )
    def test_truncate_prompt_tokens(
        self, server: Running, llm: LLM, options: dict[str, Any], kept: slice
    ) -> None:
        options |= {"return_token_ids": True}
        ids = llm.get_tokenizer().encode("hello world")
        (choice,) = complete(server, **options, echo=True)["choices"]
        assert choice["prompt_token_ids"] == ids[kept]
        text = llm.get_tokenizer().decode(ids[kept], skip_special=False)
        assert choice["text"].startswith(text)
        ids = llm.apply_chat_template(MESSAGES, add_generation_prompt=True)
        assert chat(server, **options)["prompt_token_ids"] == ids[kept]
        usage = server.post("/v1/embeddings", {"input": "hello world"} | options).json["usage"]
        assert usage["prompt_tokens"] == len(llm.get_tokenizer().encode("hello world")[kept])

    def test_truncation_to_the_context(self) -> None:
        assert Truncation(-1).cut([*range(10)], 4) == [6, 7, 8, 9]
        assert Truncation(-1, "right").cut([*range(10)], 4) == [0, 1, 2, 3]

    @pytest.mark.parametrize("prompt", [SNOWMEN, "<|im_start|>hello<|im_end|> x"])
    @pytest.mark.parametrize("as_ids", [False, True])
    def test_text_offsets(self, server: Running, llm: LLM, prompt: str, as_ids: bool) -> None:
        given = llm.get_tokenizer().encode(prompt) if as_ids else prompt
        (choice,) = complete(server, prompt=given, echo=True, logprobs=0)["choices"]
        text, scores = choice["text"], choice["logprobs"]
        offsets = scores["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)
        for offset, token in zip(offsets, scores["tokens"], strict=True):
            assert "\ufffd" in token or text.startswith(token, offset), (offset, token)

    def test_text_offsets_of_a_stream(self, server: Running) -> None:
        body = TEXT | {"max_tokens": 40, "logprobs": 0, "temperature": 2.0, "seed": 1}
        whole = complete(server, **body)["choices"][0]["logprobs"]["text_offset"]
        chunks = [
            chunk["choices"][0]["logprobs"] for chunk in stream(server, "/v1/completions", body)
        ]
        assert [offset for chunk in chunks for offset in chunk["text_offset"]] == whole


class TestOutputs:
    @pytest.mark.parametrize("more", [{}, {"stream": True}])
    def test_zero_max_tokens_with_echo(self, server: Running, more: dict[str, Any]) -> None:
        body = TEXT | {"max_tokens": 0, "echo": True} | more
        if not more:
            body["logprobs"] = 1
        if more:
            (event,) = stream(server, "/v1/completions", body)
            (choice,) = event["choices"]
        else:
            reply = server.post("/v1/completions", body).json
            (choice,) = reply["choices"]
            assert reply["usage"]["completion_tokens"] == 0
            assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
        assert (choice["text"], choice["finish_reason"]) == ("hello world", "length")

    def test_best_of(self, server: Running, llm: LLM) -> None:
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
        (expected,) = llm.generate(
            {"prompt_token_ids": llm.get_tokenizer().encode("hello world")},
            SamplingParams(n=5, ignore_eos=True, logprobs=0, **options),
        )
        ranked = sorted(
            expected.outputs, key=lambda item: -(item.cumulative_logprob or 0) / len(item.token_ids)
        )
        body = complete(server, **options, n=2, best_of=5)
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [output.text for output in ranked[:2]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 30
        for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
            assert refusal(server, "/v1/completions", TEXT | wrong) == (400, "best_of")

    def test_tokens_as_ids(self, server: Running) -> None:
        options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        (choice,) = complete(server, **options, logprobs=1)["choices"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert names[0] in choice["logprobs"]["top_logprobs"][0]
        (choice,) = chat(server, **options, logprobs=True, top_logprobs=1)["choices"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == names

    def test_zero_top_logprobs_without_logprobs(self, server: Running) -> None:
        assert chat(server, logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None
        wrong = CHAT | {"top_logprobs": 1}
        assert refusal(server, "/v1/chat/completions", wrong) == (400, "top_logprobs")

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_stream_interval(self, server: Running, path: str) -> None:
        body = TEXT | CHAT | {"return_token_ids": True, "logprobs": True}
        if path == "/v1/completions":
            body["logprobs"] = 1
        plain = stream(server, path, body)
        events = stream(server, path, body | {"stream_interval": 5})

        def parts_of(items: list[Any], get: Callable[[Any], list[Any] | None]) -> list[Any]:
            return [part for item in items for part in get(item["choices"][0]) or ()]

        def scores(choice: Any) -> list[Any] | None:
            found = choice["logprobs"]
            return found and found["content" if "chat" in path else "tokens"]

        assert parts_of(events, lambda choice: choice.get("token_ids")) == parts_of(
            plain, lambda choice: choice.get("token_ids")
        )
        assert parts_of(events, scores) == parts_of(plain, scores)

    def test_stream_interval_of_single_tokens(self) -> None:
        interval = StreamInterval(5)
        sizes = []
        for number in range(12):
            output = StepOutput(
                id="",
                index=0,
                text="a",
                token_ids=[number],
                logprobs=[],
                finish_reason="length" if number == 11 else None,
                stop_reason=None,
            )
            if found := interval.push(0, output):
                assert len(found.text) == len(found.token_ids)
                sizes.append(len(found.text))
        assert sizes == [1, 5, 5, 1]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_fields_of_a_stream(self, server: Running, path: str) -> None:
        body = TEXT | CHAT | {"stream_options": {"include_usage": True}}
        assert refusal(server, path, body) == (400, "stream_options")

    def test_request_id(self, server: Running) -> None:
        assert chat(server, request_id="a-1")["id"] == "chatcmpl-a-1"
        assert complete(server, request_id="a-1")["id"] == "cmpl-a-1"
        wrong = CHAT | {"request_id": "a b"}
        assert refusal(server, "/v1/chat/completions", wrong) == (400, "request_id")

    def test_echo_in_chat(self, server: Running) -> None:
        messages = [*MESSAGES, {"role": "assistant", "content": "Good mor"}]
        options = {"messages": messages, "continue_final_message": True}
        plain = chat(server, **options)["choices"][0]["message"]["content"]
        echoed = chat(server, **options, echo=True)["choices"][0]["message"]["content"]
        assert echoed == "Good mor" + plain
        events = stream(server, "/v1/chat/completions", CHAT | options | {"echo": True})
        deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(deltas) == echoed

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"regex": "ab"}, "ab"),
            ({"ebnf": 'root ::= "ab"'}, "ab"),
            ({"grammar": 'root ::= "ab"'}, "ab"),
            ({"json_schema": {"const": "ab"}}, '"ab"'),
            ({"json_schema": '{"const": "ab"}'}, '"ab"'),
            ({"response_format": {"type": "json_object", "schema": {"const": "ab"}}}, '"ab"'),
        ],
    )
    def test_other_names_of_structured_outputs(
        self, server: Running, options: dict[str, Any], text: str
    ) -> None:
        options |= {"ignore_eos": False}
        assert complete(server, **options)["choices"][0]["text"] == text
        assert chat(server, **options)["choices"][0]["message"]["content"] == text


SCHEMA = {"type": "json_schema", "schema": {"const": "ab"}}


class TestMessages:
    @pytest.mark.parametrize(
        "more", [{"output_config": {"format": SCHEMA}}, {"output_format": SCHEMA}]
    )
    def test_output_format(self, server: Running, more: dict[str, Any]) -> None:
        body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0} | more
        assert server.post("/v1/messages", body).json["content"][0]["text"] == '"ab"'
        events = named(server.post("/v1/messages", body | {"stream": True}))
        deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == '"ab"'

    def test_one_output_format(self, server: Running) -> None:
        body = {"messages": MESSAGES, "max_tokens": 4, "output_format": SCHEMA}
        reply = server.post("/v1/messages", body | {"output_config": {"format": SCHEMA}})
        assert reply.status == 400 and "output_format" in reply.json["error"]["message"]

    def test_usage_of_a_cached_prompt(self, server: Running) -> None:
        body = {"messages": [{"role": "user", "content": "w" * 200}], "max_tokens": 1}
        count = server.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json
        server.post("/v1/messages", body)
        whole = server.post("/v1/messages", body).json["usage"]
        streamed = dict(named(server.post("/v1/messages", body | {"stream": True})))[
            "message_delta"
        ]["usage"]
        assert whole == streamed and whole["cache_read_input_tokens"] > 0
        assert whole["input_tokens"] + whole["cache_read_input_tokens"] == count["input_tokens"]


class TestResponses:
    def test_logprobs(self, server: Running) -> None:
        body = {"input": "hello world", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
        body |= {"include": ["message.output_text.logprobs"], "ignore_eos": True}
        (item,) = server.post("/v1/responses", body).json["output"]
        (part,) = item["content"]
        assert len(part["logprobs"]) == 6
        assert {len(score["top_logprobs"]) for score in part["logprobs"]} == {2}
        chat_body = CHAT | {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
        (choice,) = server.post("/v1/chat/completions", chat_body).json["choices"]
        assert part["logprobs"] == choice["logprobs"]["content"]
        events = named(server.post("/v1/responses", body | {"stream": True}))
        deltas = [event for name, event in events if name == "response.output_text.delta"]
        assert [score for delta in deltas for score in delta["logprobs"]] == part["logprobs"]
        assert dict(events)["response.output_text.done"]["logprobs"] == part["logprobs"]
        asked = {"logprob_token_ids": [70, 3, 65]}
        (item,) = server.post("/v1/responses", body | asked).json["output"]
        (choice,) = server.post("/v1/chat/completions", chat_body | asked).json["choices"]
        assert item["content"][0]["logprobs"] == choice["logprobs"]["content"]

    def test_sampling_fields_are_those_of_chat(self, server: Running) -> None:
        options = {"top_k": 5, "seed": 3, "temperature": 1.5, "repetition_penalty": 1.3}
        options |= {"logit_bias": {"70": 5.0}, "presence_penalty": 0.5, "ignore_eos": True}
        body = {"input": "hello world", "max_output_tokens": 12} | options
        (item,) = server.post("/v1/responses", body).json["output"]
        expected = chat(server, **options)["choices"][0]["message"]["content"]
        assert item["content"][0]["text"] == expected


def test_models_for_clients_of_anthropic(server: Running) -> None:
    page = server.get("/v1/models", {"anthropic-version": "2023-06-01"}).json
    (model,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, *2 * ("tiny.gguf",))
    assert (model["type"], model["id"], model["display_name"]) == ("model", *2 * ("tiny.gguf",))
    one = server.get("/v1/models/tiny.gguf", {"anthropic-version": "2023-06-01"}).json
    assert one == model and anthropic.types.ModelInfo.model_validate(model).created_at.tzinfo


def test_tokenizer_info(server: Running, llm: LLM) -> None:
    info = server.get("/tokenizer_info").json
    assert "messages" in info["chat_template"] and info["tokenizer_class"]


def test_tokenize_of_a_continued_message(server: Running) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Good mor"}]
    options = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    usage = chat(server, **options)["usage"]
    assert server.post("/tokenize", options).json["count"] == usage["prompt_tokens"]


def test_examples_of_a_tool_are_in_its_description() -> None:
    request = CountTokensRequest(
        messages=[AnthropicMessage(role="user", content="a")],
        tools=[AnthropicTool(name="f", description="Adds.", input_examples=[{"a": 1}, {"a": 2}])],
    )
    (tool,) = AnthropicChat(request).tools or ()
    text = tool["function"]["description"]
    assert text == 'Adds.\n\nExamples of arguments:\n{"a": 1}\n{"a": 2}'
