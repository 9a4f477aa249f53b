"""Structured output and required tool calls over HTTP, with a model of random weights."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Reply, Running, running
from tests.server.test_messages_and_responses import named
from tests.server.test_tool_calls import TEMPLATE, TOOLS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Bern", "Rome"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 999},
        "is": {"type": "boolean"},
    },
    "required": ["name", "size", "is"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 200,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
HOSTILE: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "xml"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "number of the beast"}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": ["x" * 10**6]}},
        }
    },
    {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(a{1000}){1000}"}},
    {"structured_outputs": {"grammar": "start: nothing"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"allowed_sequences": []}},
    {"structured_outputs": {"allowed_sequences": [[70], []]}},
    {"structured_outputs": {"allowed_sequences": [[70], [264]]}},
    {"structured_outputs": {"allowed_sequences": [[70, -1]]}},
    {"structured_outputs": {"allowed_sequences": ["x" * 1025]}},
    {"structured_outputs": {"allowed_sequences": ["a"], "regex": "a"}},
    {"guided_choice": ["a"] * 2000},
    {"guided_regex": "x" * 70_000},
    {"guided_regex": "(a?){1600}a{1600}"},
    {
        "guided_json": {
            "allOf": [
                {"type": "integer", "multipleOf": 1009},
                {"type": "integer", "multipleOf": 1013},
            ]
        }
    },
    {"guided_json": {"type": "object", "properties": {f"p{i}": True for i in range(4400)}}},
]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose outputs have no reasoning, which a random model would not end."""
    template = re.sub(r"\{% if enable_thinking.*?endif %\}|\{#.*?#\}", "", TEMPLATE)
    change = {"tokenizer.chat_template": template, "llama.context_length": 1024}
    model = write_tiny_gguf(tmp_path_factory.mktemp("calls") / "calls.gguf", change)
    yield from running(str(model), "--threads", "1", "--kv-blocks", "64")


def content(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["message"]["content"]
    return text


def nested(depth: int) -> dict[str, Any]:
    return {"oneOf": [nested(depth - 1), {"type": "null"}]} if depth else {"type": "string"}


class TestText:
    @pytest.mark.parametrize(
        "more",
        [
            {"response_format": FORMAT},
            {"structured_outputs": {"json": SCHEMA}},
            {"guided_json": json.dumps(SCHEMA)},
        ],
    )
    def test_json_schema(self, server: Running, more: dict[str, Any]) -> None:
        for sampled in ({}, {"temperature": 1.5, "seed": 1}):
            jsonschema.validate(
                json.loads(content(server.post("/v1/chat/completions", CHAT | more | sampled))),
                SCHEMA,
            )

    def test_regex_choice_grammar_and_json_object(self, server: Running) -> None:
        def text(**more: Any) -> str:
            return content(server.post("/v1/chat/completions", CHAT | more))

        assert re.fullmatch(
            "[ab]{3}-[0-9]+x", text(structured_outputs={"regex": "[ab]{3}-[0-9]{2,5}x"})
        )
        assert text(guided_choice=["north", "south"]) in ("north", "south")
        assert re.fullmatch(
            "(ab)+c", text(guided_grammar='start: ("ab")+ "c"', temperature=1, seed=2)
        )
        assert (
            text(response_format={"type": "text"}, structured_outputs={"choice": ["yes"]}) == "yes"
        )

    def test_items(self, server: Running) -> None:
        items = ["north", "no", [70, 71, 72], [70, 71, 73], [80, 81]]
        among = {"structured_outputs": {"allowed_sequences": items}, "return_token_ids": True}
        reply = server.post("/v1/chat/completions", CHAT | among)
        assert content(reply) in ("north", "no") or reply.json["choices"][0]["token_ids"] in items

        body = {"prompt": [70, 75], "use_beam_search": True, "n": 6, "max_tokens": 9} | among
        found = server.post("/v1/completions", body)
        assert found.status == 200, found.body
        choices = found.json["choices"]
        # "no" may end with either end token.
        assert {choice["finish_reason"] for choice in choices} == {"stop"} and len(choices) == 6
        ids = [choice["token_ids"] for choice in choices]
        assert all(item in ids for item in items if isinstance(item, list))
        assert {"north", "no"} <= {choice["text"] for choice in choices}

        del among["return_token_ids"]
        again = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 9} | among)
        assert again.status == 200 and again.json["status"] == "completed", again.body

    def test_items_after_calls_of_tools_are_refused(self, tools: Running) -> None:
        among = {"structured_outputs": {"allowed_sequences": ["a", "b"]}, "tools": TOOLS}
        reply = tools.post("/v1/chat/completions", CHAT | among)
        assert reply.status == 400 and "leave tools out" in reply.json["error"]["message"]

    def test_structural_tag_and_json_object_with_a_schema(self, server: Running) -> None:
        def reply(**more: Any) -> Reply:
            return server.post("/v1/chat/completions", CHAT | more)

        tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
        assert content(reply(response_format=tag)) == "yes"
        assert content(reply(structured_outputs={"structural_tag": json.dumps(tag)})) == "yes"
        text = content(reply(response_format={"type": "json_object", "schema": SCHEMA}))
        jsonschema.validate(json.loads(text), SCHEMA)
        for value, path in (
            ({"type": "json_object", "schema": {"type": "strin"}}, "response_format.schema"),
            ({"type": "structural_tag", "format": {}}, "response_format.format.type"),
        ):
            error = reply(response_format=value).json["error"]
            assert (error["message"].split()[0], error["param"]) == (path, "response_format")

    def test_structured_output_of_every_api(self, server: Running) -> None:
        whole = content(server.post("/v1/chat/completions", CHAT | {"response_format": FORMAT}))
        body = {
            "prompt": "hello",
            "max_tokens": 200,
            "temperature": 0,
            "structured_outputs": {"json": SCHEMA},
        }
        jsonschema.validate(
            json.loads(server.post("/v1/completions", body).json["choices"][0]["text"]), SCHEMA
        )
        request = {
            "input": "hello",
            "temperature": 0,
            "max_output_tokens": 200,
            "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
        }
        reply = server.post("/v1/responses", request)
        assert reply.status == 200 and reply.json["output"][0]["content"][0]["text"] == whole, (
            reply.body
        )
        events = server.post(
            "/v1/chat/completions", CHAT | {"response_format": FORMAT, "stream": True}
        ).events[:-1]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole

    def test_structured_output_with_neighbours_and_n(self, server: Running) -> None:
        body = CHAT | {
            "response_format": FORMAT,
            "n": 4,
            "temperature": 1,
            "seed": 3,
            "logprobs": True,
        }
        for choice in server.post("/v1/chat/completions", body).json["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)

    def test_allowed_token_ids_and_bad_words(self, server: Running) -> None:
        body = CHAT | {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        ids = server.post("/v1/chat/completions", body | {"allowed_token_ids": [70, 71]}).json[
            "choices"
        ][0]["token_ids"]
        assert set(ids) <= {70, 71}
        text = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        word = re.findall("[A-Za-z]", text)[0]
        assert (
            word
            not in server.post("/v1/chat/completions", body | {"bad_words": [word]}).json[
                "choices"
            ][0]["message"]["content"]
        )
        for wrong in ([264], [2**31], [-1], []):
            reply = server.post("/v1/chat/completions", body | {"allowed_token_ids": wrong})
            assert (reply.status, reply.json["error"]["param"]) == (400, "allowed_token_ids"), wrong

    @pytest.mark.parametrize("number", range(len(HOSTILE)))
    def test_invalid_structured_output_is_refused(self, server: Running, number: int) -> None:
        reply = server.post("/v1/chat/completions", CHAT | HOSTILE[number])
        assert reply.status == 400 and reply.json["error"]["param"], reply.body

    def test_deep_schemas(self, server: Running) -> None:
        for depth in (10, 30, 200):
            body = CHAT | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": nested(depth)},
                },
                "max_tokens": 5,
            }
            assert server.post("/v1/chat/completions", body).status in (200, 400)
        assert (
            server.post(
                "/v1/chat/completions", CHAT | {"guided_regex": "(a+)+b", "max_tokens": 5}
            ).status
            == 200
        )


class TestToolChoice:
    ASK: dict[str, Any] = CHAT | {"tools": TOOLS, "max_tokens": 400}

    @pytest.mark.parametrize(
        "choice, names",
        [
            ("required", {"weather", "time"}),
            ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ],
    )
    def test_required_and_named_tool_calls(
        self, tools: Running, choice: Any, names: set[str]
    ) -> None:
        for sampled in ({}, {"temperature": 1.0, "seed": 4}):
            body = self.ASK | {"tool_choice": choice, "parallel_tool_calls": False} | sampled
            response = tools.post("/v1/chat/completions", body).json["choices"][0]
            (call,) = response["message"]["tool_calls"]
            assert call["type"] == "function" and call["id"] and call["function"]["name"] in names
            if response["finish_reason"] != "length":
                assert (
                    response["finish_reason"] == "tool_calls"
                    and response["message"]["content"] is None
                )
                assert isinstance(json.loads(call["function"]["arguments"]), dict)

    def test_stream_of_tool_calls(self, tools: Running) -> None:
        body = self.ASK | {"tool_choice": {"type": "function", "function": {"name": "time"}}}
        whole = tools.post("/v1/chat/completions", body).json["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        (call,) = whole["message"]["tool_calls"]
        events = tools.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
        deltas = [
            entry
            for event in events
            for entry in event["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert set(deltas[0]) == {"index", "id", "type", "function"} and deltas[0]["function"] == {
            "name": "time",
            "arguments": "",
        }
        assert all(
            set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
            for delta in deltas[1:]
        )
        assert (
            "".join(delta["function"]["arguments"] for delta in deltas)
            == call["function"]["arguments"]
            == "{}"
        )
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_tool_choice_of_messages_and_responses(self, tools: Running) -> None:
        schemas = [{"name": tool["function"]["name"]} for tool in TOOLS]  # type: ignore[index]
        body = {"messages": CHAT["messages"], "max_tokens": 100, "temperature": 0, "tools": schemas}
        body |= {"tool_choice": {"type": "tool", "name": "time"}}
        response = tools.post("/v1/messages", body).json
        (block,) = response["content"]
        assert (response["stop_reason"], block["type"], block["name"], block["input"]) == (
            "tool_use",
            "tool_use",
            "time",
            {},
        )
        names = [name for name, _ in named(tools.post("/v1/messages", body | {"stream": True}))]
        assert names.count("content_block_start") == names.count("content_block_stop") == 1
        functions = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
        request = {"input": "hello", "temperature": 0, "tools": functions, "max_output_tokens": 100}
        (item,) = tools.post(
            "/v1/responses", request | {"tool_choice": {"type": "function", "name": "time"}}
        ).json["output"]
        assert (item["type"], item["name"], item["arguments"], item["status"]) == (
            "function_call",
            "time",
            "{}",
            "completed",
        )

    @pytest.mark.parametrize("restriction", [{"response_format": FORMAT}, {"guided_regex": "a"}])
    def test_demanded_calls_win_over_a_format(
        self, tools: Running, restriction: dict[str, Any]
    ) -> None:
        """The format is that of message text, which the response has not."""
        choice = {"type": "function", "function": {"name": "time"}}
        body = self.ASK | {"tool_choice": choice}
        plain, both = (
            tools.post("/v1/chat/completions", body | more).json["choices"][0]
            for more in ({}, restriction)
        )
        (call,), (expected,) = both["message"]["tool_calls"], plain["message"]["tool_calls"]
        assert call["function"] == expected["function"]
        assert both["finish_reason"] == "tool_calls" and both["message"]["content"] is None


LOOSE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}},
    "required": ["a"],
    "additionalProperties": False,
}


class TestStrict:
    """Keywords that no grammar enforces: refused by their path, or dropped and listed."""

    PATH = "properties.a.uniqueItems"

    def requests(self, strict: bool | None) -> list[tuple[str, dict[str, Any], str]]:
        own = {} if strict is None else {"strict": strict}
        function = {"name": "f", "parameters": LOOSE, **own}
        chat = CHAT | {"tool_choice": "required", "parallel_tool_calls": False}
        schema = {"name": "x", "schema": LOOSE, **own}
        message = {"messages": CHAT["messages"], "max_tokens": 60, "temperature": 0}
        response = {"input": "hello", "max_output_tokens": 60, "temperature": 0}
        return [
            (
                "/v1/chat/completions",
                chat | {"tools": [{"type": "function", "function": function}]},
                "tools[0].function.parameters",
            ),
            (
                "/v1/chat/completions",
                CHAT | {"response_format": {"type": "json_schema", "json_schema": schema}},
                "response_format.json_schema.schema",
            ),
            (
                "/v1/completions",
                {"prompt": "x", "structured_outputs": {"json": LOOSE, **own}},
                "json",
            ),
            (
                "/v1/responses",
                response | {"tool_choice": "required", "tools": [{"type": "function"} | function]},
                "tools[0].parameters",
            ),
            (
                "/v1/responses",
                response | {"text": {"format": {"type": "json_schema", **schema}}},
                "text.format.schema",
            ),
            (
                "/v1/messages",
                message
                | {"tool_choice": {"type": "any"}}
                | {"tools": [{"name": "f", "input_schema": LOOSE, **own}]},
                "tools[0].input_schema",
            ),
        ]

    @pytest.mark.parametrize("number", range(6))
    def test_strict_of_every_api(self, tools: Running, number: int) -> None:
        for strict in (None, True):
            route, body, field = self.requests(strict)[number]
            reply = tools.post(route, body)
            message = reply.json["error"]["message"]
            assert reply.status == 400 and f"{field}.{self.PATH} cannot be enforced" in message
            assert "%json" not in message and "set strict to false" in message

        route, body, field = self.requests(False)[number]
        reply = tools.post(route, body)
        assert reply.status == 200, reply.body
        assert reply.headers["x-dropped-schema-keywords"] == f"{field}.{self.PATH}"

    def test_a_tool_that_cannot_be_compiled_is_named(self, tools: Running) -> None:
        """The error has the tool and the path, and nothing of the grammar."""
        wrong = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a{,3}"}}}
        functions = [{"name": "good"}, {"name": "bad", "parameters": wrong}]
        made = [{"type": "function", "function": function} for function in functions]
        reply = tools.post(
            "/v1/chat/completions", CHAT | {"tools": made, "tool_choice": "required"}
        )
        message = reply.json["error"]["message"]
        assert reply.status == 400 and reply.json["error"]["param"] == "tools"
        assert message.startswith("tools[1].function.parameters.properties.a cannot be compiled")
        assert "%json" not in message
