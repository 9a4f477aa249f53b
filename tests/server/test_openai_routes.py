"""OpenAI's routes over HTTP: the tokens of `LLM` in OpenAI's shapes, with and without streams."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Running, running

MESSAGES = [{"role": "user", "content": "hello world"}]
CHAT: dict[str, Any] = {
    "messages": MESSAGES,
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}
TEXT: dict[str, Any] = {
    "prompt": "hello world",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}
MARKED = "<|im_start|>hello<|im_end|>"
SAMPLED = {"temperature": 1.5, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}


def chat(server: Running, **more: Any) -> Any:
    reply = server.post("/v1/chat/completions", CHAT | more)
    assert reply.status == 200, reply.body
    return reply.json


def complete(server: Running, **more: Any) -> Any:
    reply = server.post("/v1/completions", TEXT | more)
    assert reply.status == 200, reply.body
    return reply.json


def stream(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    reply = server.post(path, body | {"stream": True})
    assert (
        reply.status == 200 and reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    )
    assert (
        reply.headers["cache-control"] == "no-cache" and reply.headers["x-accel-buffering"] == "no"
    )
    *events, last = reply.events
    assert last == "[DONE]"
    return events


class TestChat:
    @pytest.mark.parametrize(
        "more",
        [{}, SAMPLED, SAMPLED | {"n": 3}, {"logit_bias": {"70": 5.0}, "repetition_penalty": 1.3}],
    )
    def test_chat_tokens_equal_llm(self, server: Running, llm: LLM, more: dict[str, Any]) -> None:
        options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | more
        if "logit_bias" in options:
            options["logit_bias"] = {
                int(token): bias for token, bias in options["logit_bias"].items()
            }
        (expected,) = llm.chat(MESSAGES, SamplingParams(**options))
        response = chat(server, **more, return_token_ids=True)
        assert [choice["token_ids"] for choice in response["choices"]] == [
            output.token_ids for output in expected.outputs
        ]
        assert [choice["message"]["content"] for choice in response["choices"]] == [
            output.text for output in expected.outputs
        ]
        assert [choice["index"] for choice in response["choices"]] == list(
            range(len(expected.outputs))
        )
        usage, count = response["usage"], 12 * len(expected.outputs)
        assert (
            usage["prompt_tokens"] == len(expected.prompt_token_ids)
            and usage["completion_tokens"] == count
        )
        assert usage["total_tokens"] == usage["prompt_tokens"] + count
        assert (response["object"], response["model"]) == ("chat.completion", "tiny.gguf")

    @pytest.mark.parametrize(
        "more", [{}, SAMPLED | {"n": 3}, {"stop": ["a", "QQ"], "ignore_eos": False}]
    )
    def test_chat_stream_equals_response(self, server: Running, more: dict[str, Any]) -> None:
        whole = chat(server, **more)
        events = stream(
            server,
            "/v1/chat/completions",
            CHAT | more | {"stream_options": {"include_usage": True}},
        )
        *chunks, last = events
        assert (
            last["choices"] == []
            and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        )
        assert (
            len({(item["id"], item["created"], item["model"], item["object"]) for item in events})
            == 1
        )
        assert events[0]["object"] == "chat.completion.chunk" and all(
            chunk["usage"] is None for chunk in chunks
        )
        for choice in whole["choices"]:
            mine = [
                chunk["choices"][0]
                for chunk in chunks
                if chunk["choices"][0]["index"] == choice["index"]
            ]
            first, *middle, end = mine
            assert (
                first["delta"] == {"role": "assistant", "content": ""}
                and first["finish_reason"] is None
            )
            assert all(
                set(item["delta"]) == {"content"} and item["finish_reason"] is None
                for item in middle
            )
            assert end["delta"] == {} and end["finish_reason"] == choice["finish_reason"]
            assert (
                "".join(item["delta"]["content"] for item in middle) == choice["message"]["content"]
            )

    def test_usage_only_with_include_usage(self, server: Running) -> None:
        assert all(
            "usage" not in chunk and chunk["choices"]
            for chunk in stream(server, "/v1/chat/completions", CHAT)
        )
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            item["usage"]["completion_tokens"]
            for item in stream(server, "/v1/chat/completions", CHAT | {"stream_options": options})
        ]
        assert counts == sorted(counts) and counts[-1] == 12

    def test_chat_logprobs(self, server: Running, llm: LLM) -> None:
        (expected,) = llm.chat(
            MESSAGES, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
        )
        entries = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
        scores = expected.outputs[0].logprobs
        assert scores is not None and len(entries) == 12
        for entry, token, given in zip(entries, expected.outputs[0].token_ids, scores, strict=True):
            assert entry["logprob"] == given[token].logprob and bytes(
                entry["bytes"]
            ) == llm.get_tokenizer().token_bytes(token)
            likeliest = sorted(given.values(), key=lambda item: item.rank)[:2]
            assert [item["logprob"] for item in entry["top_logprobs"]] == [
                item.logprob for item in likeliest
            ]
        streamed = stream(
            server, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}
        )
        parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
        assert [entry for part in parts if part for entry in part["content"]] == entries
        plain = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in plain] == [
            entry["logprob"] for entry in entries
        ] and plain[0]["top_logprobs"] == []

    def test_top_logprobs_of_tokens_with_one_text(self, server: Running) -> None:
        """Several tokens of the top may be the same broken character; the likeliest counts."""
        body = {"prompt": "The longest river", "max_tokens": 12, "temperature": 0, "logprobs": 5}
        scores = server.post("/v1/completions", body).json["choices"][0]["logprobs"]
        assert min(map(len, scores["top_logprobs"])) < 5
        for token, score, top in zip(
            scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
        ):
            assert top[token] == score == max(top.values())

    def test_logprobs_of_named_tokens(self, server: Running, llm: LLM) -> None:
        named = [70, 3, 65]
        params = SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, logprobs=0, logprob_token_ids=named
        )
        (expected,) = llm.chat(MESSAGES, params)
        expected_entries = expected.outputs[0].logprobs or []
        scores = [[score.logprob for score in entry.values()] for entry in expected_entries]
        assert len(scores) == 12
        asked = {"logprobs": True, "logprob_token_ids": named}
        entries = chat(server, **asked)["choices"][0]["logprobs"]["content"]
        assert [[item["logprob"] for item in entry["top_logprobs"]] for entry in entries] == scores
        chunks = stream(server, "/v1/chat/completions", CHAT | asked)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for part in parts if part for entry in part["content"]] == entries

    def test_named_tokens_of_a_completion(self, server: Running, llm: LLM) -> None:
        asked = {"logprobs": 1, "logprob_token_ids": [70, 3], "return_tokens_as_token_ids": True}
        reply = server.post("/v1/completions", TEXT | asked).json
        for top in reply["choices"][0]["logprobs"]["top_logprobs"]:
            assert {"token_id:70", "token_id:3"} <= set(top) and len(top) in (2, 3)

    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            ({"logprob_token_ids": [70]}, 400),
            ({"logprobs": 1, "logprob_token_ids": []}, 400),
            ({"logprobs": 1, "logprob_token_ids": [10**6]}, 400),
            ({"logprobs": 1, "logprob_token_ids": [70], "use_beam_search": True, "n": 2}, 400),
            ({"logprobs": 1, "logprob_token_ids": [70]}, 200),
        ],
    )
    def test_named_tokens_are_checked(
        self, server: Running, fields: dict[str, Any], status: int
    ) -> None:
        reply = server.post("/v1/completions", TEXT | fields)
        assert reply.status == status
        if status == 400:
            assert reply.json["error"]["param"] == "logprob_token_ids"

    def test_infinite_logprobs_are_bounded(self, server: Running) -> None:
        banned = {str(token): -100 for token in range(0, 200)}
        reply = server.post(
            "/v1/completions",
            TEXT | {"logprobs": 20, "logit_bias": banned, "temperature": 2, "seed": 1},
        )
        values = json.loads(reply.body, parse_constant=lambda name: pytest.fail(name))["choices"][
            0
        ]["logprobs"]["token_logprobs"]
        assert all(math.isfinite(value) for value in values)

    def test_max_tokens_and_max_completion_tokens(self, server: Running) -> None:
        assert chat(server, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
        assert chat(server, max_completion_tokens=3)["choices"][0]["finish_reason"] == "length"

    def test_content_parts_and_system_messages(self, server: Running) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
        assert chat(server, messages=parts)["choices"] == chat(server)["choices"]
        longer = chat(server, messages=[{"role": "system", "content": "be"}, *MESSAGES])["usage"][
            "prompt_tokens"
        ]
        assert longer > chat(server)["usage"]["prompt_tokens"]

    @pytest.mark.parametrize(
        "path, param, more",
        [
            ("chat/completions", "max_tokens", {"max_tokens": 4096}),
            ("chat/completions", "max_completion_tokens", {"max_completion_tokens": 4096}),
            ("completions", "max_tokens", {"prompt": [7] * 9, "max_tokens": 4090}),
            (
                "chat/completions",
                "messages",
                {"messages": [{"role": "user", "content": "a b" * 9000}]},
            ),
            ("completions", "prompt", {"prompt": [7] * 4097}),
            ("completions", "prompt", {"prompt": [7] * 4096}),
            ("responses", "input", {"input": "a b" * 9000}),
            ("responses", "max_output_tokens", {"input": "a", "max_output_tokens": 4096}),
        ],
    )
    def test_context_length_exceeded(
        self, server: Running, path: str, param: str, more: dict[str, Any]
    ) -> None:
        """LiteLLM, LangChain and Claude Code recognise this error by words of its message."""
        reply = server.post(f"/v1/{path}", more if path == "responses" else CHAT | more)
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            param,
        )
        assert (
            "exceed context limit" if param.startswith("max") else "prompt is too long"
        ) in error["message"] and "this model's maximum context length is 4,096" in error["message"]
        # A shorter prompt helps unless the limit of the output alone exceeds the context.
        helps = not param.startswith("max") or more[param] < 4096
        assert ("prompt is too long" in error["message"]) == helps


class TestCompletions:
    def test_completion_prompt_forms(self, server: Running, llm: LLM) -> None:
        ids = llm.get_tokenizer().encode("hello world")
        item = complete(server)["choices"][0]["text"]
        for prompt in (["hello world"], ids, [ids]):
            assert [choice["text"] for choice in complete(server, prompt=prompt)["choices"]] == [
                item
            ]
        response = complete(server, prompt=["hello world", "w", "hello world"], n=2, **SAMPLED)
        texts = [choice["text"] for choice in response["choices"]]
        assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3, 4, 5] and texts[
            :2
        ] == texts[4:]
        assert response["usage"]["completion_tokens"] == 6 * 12
        for prompt in ([], ["a"] * 257, [1, "a"], [[1], "a", 5], [10**6], [[]]):
            assert server.post("/v1/completions", TEXT | {"prompt": prompt}).status == 400, prompt

    def test_completion_stream_of_several_prompts(self, server: Running) -> None:
        body = TEXT | {"prompt": ["hello", "w"], "n": 2, "echo": True} | SAMPLED
        whole = server.post("/v1/completions", body).json["choices"]
        events = stream(server, "/v1/completions", body)
        for choice in whole:
            mine = [
                event["choices"][0]
                for event in events
                if event["choices"][0]["index"] == choice["index"]
            ]
            assert (
                "".join(item["text"] for item in mine) == choice["text"]
                and mine[-1]["finish_reason"] == "length"
            )

    def test_echo_with_prompt_logprobs(self, server: Running, llm: LLM) -> None:
        """lm-eval sends such requests."""
        ids = llm.get_tokenizer().encode("hello world, hello")
        (expected,) = llm.generate(
            {"prompt_token_ids": ids},
            SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1),
        )
        scores = complete(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True)["choices"][0][
            "logprobs"
        ]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert expected.prompt_logprobs is not None
        given = [
            entry[token].logprob
            for entry, token in zip(expected.prompt_logprobs[1:], ids[1:], strict=True)
            if entry
        ]
        assert scores["token_logprobs"][1:-1] == given and len(scores["tokens"]) == len(ids) + 1
        assert scores["text_offset"] == [
            sum(map(len, scores["tokens"][:i])) for i in range(len(ids) + 1)
        ]

    def test_stop_strings_are_not_in_the_text(self, server: Running) -> None:
        text = complete(server, max_tokens=60)["choices"][0]["text"]
        for begin in range(2, 20, 3):
            stop = text[begin : begin + 3]
            expected = text[: text.index(stop)]
            body = TEXT | {"max_tokens": 60, "stop": [stop]}
            assert server.post("/v1/completions", body).json["choices"][0]["text"] == expected
            chunks = [event["choices"][0] for event in stream(server, "/v1/completions", body)]
            assert "".join(chunk["text"] for chunk in chunks) == expected
            assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", stop)


class TestOthers:
    def test_embeddings(self, server: Running, llm: LLM) -> None:
        expected = llm.embed(["hello", "world w"], normalise=True)
        floats = server.post("/v1/embeddings", {"input": ["hello", "world w"]}).json
        assert np.array_equal(
            np.array([item["embedding"] for item in floats["data"]], np.float32), expected
        )
        packed = server.post(
            "/v1/embeddings", {"input": ["hello", "world w"], "encoding_format": "base64"}
        ).json
        assert np.array_equal(
            np.stack(
                [
                    np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
                    for item in packed["data"]
                ]
            ),
            expected,
        )
        mean = server.post(
            "/v1/embeddings", {"input": "hello", "pooling": "mean", "normalize": False}
        ).json["data"][0]["embedding"]
        assert np.array_equal(np.array(mean, np.float32), llm.embed("hello", "mean")[0])
        for wrong in (
            {"input": []},
            {"input": ""},
            {"input": "a", "encoding_format": "int8"},
            {"input": "a", "dimensions": 5},
            {"input": 5},
        ):
            assert server.post("/v1/embeddings", wrong).status == 400, wrong

    def test_tokenize_and_detokenize(self, server: Running, llm: LLM) -> None:
        tokenizer, text = llm.get_tokenizer(), "hello world \N{SNOWMAN}"
        found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert found["tokens"] == tokenizer.encode(text) and found["count"] == len(
            found["tokens"]
        ) == len(found["token_strs"])
        plain = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json[
            "tokens"
        ]
        assert server.post("/detokenize", {"tokens": plain}).json["prompt"] == text
        rendered = server.post("/tokenize", {"messages": MESSAGES}).json["tokens"]
        assert rendered == llm.apply_chat_template(MESSAGES, add_generation_prompt=True)
        for wrong in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 5}):
            assert server.post("/tokenize", wrong).status == 400
        assert server.post("/detokenize", {"tokens": [264]}).status == 400
        assert server.get("/tokenizer_info").json["vocab_size"] == 264

    @pytest.mark.parametrize(
        ("options", "special", "num_tokens"),
        [
            ({"prompt": MARKED}, {1, 2}, 3),
            ({"prompt": MARKED, "parse_special": False}, set(), 23),
            ({"prompt": MARKED, "add_special_tokens": False}, {1, 2}, 3),
            ({"content": MARKED}, {1, 2}, 3),
            ({"content": MARKED, "parse_special": False, "add_special": True}, set(), 23),
        ],
    )
    def test_control_tokens_in_tokenize(
        self, server: Running, options: dict[str, Any], special: set[int], num_tokens: int
    ) -> None:
        found = server.post("/tokenize", options).json
        assert ({1, 2} & set(found["tokens"]), found["count"]) == (special, num_tokens)
        assert server.post("/detokenize", {"tokens": found["tokens"]}).json["content"] == MARKED

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_a_control_token_as_a_stop_string(self, server: Running, path: str) -> None:
        grammar = {"grammar": 'start: "ab" <|im_start|> "c"'}
        body = (TEXT if path == "/v1/completions" else CHAT) | {
            "stop": ["<|im_start|>"],
            "structured_outputs": grammar,
        }
        (choice,) = server.post(path, body).json["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("ab", "stop")
        *events, last = [event["choices"][0] for event in stream(server, path, body)]
        pieces = [event.get("text") or event.get("delta", {}).get("content") for event in events]
        assert "".join(filter(None, pieces)) + (last.get("text") or "") == "ab"
        assert last["stop_reason"] == "<|im_start|>"

    def test_tokenize_as_llama_cpp_does(self, server: Running) -> None:
        """It adds no special tokens by default; a part of a character has bytes."""
        options = {"content": "hello\N{SNOWMAN}", "with_pieces": True}
        tokens = server.post("/tokenize", options).json["tokens"]
        pieces = [token["piece"] for token in tokens]
        assert pieces == ["hello", [0xE2], [0x98], [0x83]]
        assert tokens[0]["id"] == 262

    @pytest.mark.parametrize(("options", "num_tokens"), [({}, 3), ({"parse_special": False}, 23)])
    def test_control_tokens_in_prompts(
        self, server: Running, options: dict[str, Any], num_tokens: int
    ) -> None:
        found = complete(server, prompt=MARKED, max_tokens=2, echo=True, **options)
        assert found["usage"]["prompt_tokens"] == num_tokens
        assert found["choices"][0]["text"].startswith(MARKED)
        found = server.post("/v1/embeddings", {"input": MARKED} | options).json
        assert found["usage"]["prompt_tokens"] == num_tokens

    def test_models(self, server: Running) -> None:
        (model,) = server.get("/v1/models").json["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (
            "tiny.gguf",
            "model",
            4096,
        )
        assert server.get("/v1/models/tiny.gguf").json == model
        assert chat(server, model="tiny.gguf")["choices"] == chat(server)["choices"]
        reply = server.post("/v1/chat/completions", CHAT | {"model": "gpt-4"})
        assert (reply.status, reply.json["error"]["code"], reply.json["error"]["param"]) == (
            404,
            "model_not_found",
            "model",
        )

    def test_prometheus_metrics(self, server: Running) -> None:
        chat(server)
        text = server.get("/metrics").body.decode()
        for name in (
            "headrace_time_to_first_token_seconds_bucket",
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
        ):
            assert name in text
        assert server.figures()["headrace_time_to_first_token_seconds_count"] >= 1


def test_advised_sampling(tmp_path: Path, llm: LLM) -> None:
    model = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        {"general.sampling.temp": 0.0, "general.sampling.penalty_repeat": 1.5},
    )
    request: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 12,
        "seed": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    advised = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, repetition_penalty=1.5)
    plain = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.7, repetition_penalty=1.0, seed=1
    )
    flags = ("--threads", "1", "--kv-blocks", "16")
    for server in running(str(model), *flags):
        assert any(
            line.startswith("sampling  temperature 0, repetition_penalty 1.5")
            for line in server.log
        )
        responses = [
            server.post("/v1/chat/completions", request | more).json
            for more in ({}, {"temperature": 0.7, "repetition_penalty": 1})
        ]
        expected = llm.chat([MESSAGES, MESSAGES], [advised, plain])
        assert [response["choices"][0]["token_ids"] for response in responses] == [
            result.outputs[0].token_ids for result in expected
        ]
    for server in running(str(model), *flags, "--ignore-advised-sampling"):
        response = server.post("/v1/chat/completions", request).json
        (expected_one,) = llm.chat(MESSAGES, SamplingParams(max_tokens=12, ignore_eos=True, seed=1))
        assert response["choices"][0]["token_ids"] == expected_one.outputs[0].token_ids
