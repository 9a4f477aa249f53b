"""Tools and reasoning over HTTP: their prompts, and the parsed output."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM
from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Running, running

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls "
    "%}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor "
    "%}{% endif %}{{ m.content or '' }}\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor "
    '%}<tool_call>\n{"name": ...}\n</tool_call>{% endif %}'
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is not defined or "
    "enable_thinking %}<think>{% endif %}{% endif %}"
    "{# <think> </think> #}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ASK = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 300}


@pytest.fixture(scope="module")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    change = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 1024}
    return str(write_tiny_gguf(tmp_path_factory.mktemp("tools") / "tools.gguf", change))


@pytest.fixture(scope="module")
def tools(tools_model: str) -> Iterator[Running]:
    yield from running(tools_model, "--threads", "1", "--kv-blocks", "64")


@pytest.fixture(scope="module")
def tools_llm(tools_model: str) -> Iterator[LLM]:
    with LLM(tools_model, threads=1, kv_blocks=64) as llm:
        yield llm


class TestPrompts:
    def test_tools_and_tool_calls_reach_the_template(self, tools: Running) -> None:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
        }
        messages = [
            *ASK["messages"],
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sun"},
        ]  # type: ignore[misc]
        ids = tools.post("/tokenize", {"messages": messages, "tools": TOOLS}).json["tokens"]
        text = tools.post("/detokenize", {"tokens": ids}).json["prompt"]
        assert (
            "<assistant>weather city=Bern\n<tool>sun\nweather time <tool_call>" in text
            and text.endswith("<assistant><think>")
        )

    def test_reasoning_can_be_disabled(self, tools: Running) -> None:
        for more in (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            plain = tools.post("/v1/chat/completions", ASK | {"max_tokens": 1}).json["usage"][
                "prompt_tokens"
            ]
            reply = tools.post("/v1/chat/completions", ASK | {"max_tokens": 1} | more)
            assert (
                reply.json["usage"]["prompt_tokens"] < plain
                and "reasoning" not in reply.json["choices"][0]["message"]
            )

    def test_continue_final_message(self, tools: Running, tools_llm: LLM) -> None:
        messages = [*ASK["messages"], {"role": "assistant", "content": "Once upon"}]  # type: ignore[misc]
        ids = tools_llm.apply_chat_template(messages, continue_final_message=True)
        assert isinstance(ids, list) and tools_llm.get_tokenizer().decode(ids).endswith(
            "<assistant>Once upon"
        )
        reply = tools.post(
            "/v1/chat/completions",
            ASK | {"messages": messages, "continue_final_message": True, "max_tokens": 5},
        )
        assert reply.json["usage"]["prompt_tokens"] == len(ids)

    @pytest.mark.parametrize(
        "more, param",
        [
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
            ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
            (
                {
                    "tools": TOOLS,
                    "tool_choice": {"type": "function", "function": {"name": "other"}},
                },
                "tool_choice",
            ),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ],
    )
    def test_invalid_tools_are_refused(
        self, tools: Running, more: dict[str, Any], param: str
    ) -> None:
        reply = tools.post("/v1/chat/completions", ASK | more)
        assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body

    def test_tool_choice_none_hides_the_tools(self, tools: Running) -> None:
        reply = tools.post(
            "/tokenize",
            {"prompt": "hello", "tools": [{"type": "function", "function": {"name": ""}}]},
        )
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools")


class TestOutput:
    def test_output_starts_in_reasoning(self, tools: Running) -> None:
        body = ASK | {"max_tokens": 30, "ignore_eos": True}
        message = tools.post("/v1/chat/completions", body).json["choices"][0]["message"]
        assert message["content"] is None and message["reasoning"]
        deltas = [
            event["choices"][0]["delta"]
            for event in tools.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
        ]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
