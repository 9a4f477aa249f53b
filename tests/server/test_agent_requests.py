"""Requests as coding agents send them: tools and items of all kinds, and histories with faults."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.checkpoint.templates import Renderer
from headrace.prompts import PromptReader
from headrace.server.anthropic_content import AnthropicChat
from headrace.server.anthropic_records import MessagesRequest
from headrace.server.lark_regex import lark_to_regex
from headrace.server.responses_input import custom_input
from tests.server.running import Reply, Running, until
from tests.server.scripted_model import ScriptedModel
from tests.server.test_messages_and_responses import named
from tests.server.test_tool_calls import TOOLS, tools, tools_model  # noqa: F401 - fixtures
from tests.test_messages import tiny_tokenizer

USER = {"role": "user", "content": "hello"}
ONE_VALUE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
ONE_VALUE["additionalProperties"] = False  # type: ignore[assignment]
FUNCTION = {"type": "function", "name": "read", "parameters": ONE_VALUE}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Change a file.",
    "format": {"type": "grammar", "syntax": "regex", "definition": 'ab"c'},
}
NAMESPACE = {"type": "namespace", "name": "mcp__disk__", "tools": [FUNCTION, CUSTOM]}
HOSTED = [
    {"type": kind}
    for kind in ("web_search", "image_generation", "local_shell", "mcp", "tool_search", "new")
]
ALL_TOOLS = [FUNCTION, *HOSTED[:3], CUSTOM, NAMESPACE, *HOSTED[3:]]
NO_THOUGHT = {"reasoning": {"effort": "none"}, "max_output_tokens": 120}


def respond(server: Running, **fields: Any) -> Any:
    reply = server.post("/v1/responses", {"input": [USER], **NO_THOUGHT, **fields})
    assert reply.status == 200, reply.body
    return reply.json


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "function": (
        {"type": "function", "name": "read"},
        {"type": "function_call", "name": "read", "arguments": '{"a": 1}'},
    ),
    "custom": (
        {"type": "custom", "name": "patch"},
        {"type": "custom_tool_call", "name": "patch", "input": 'ab"c'},
    ),
    "namespace": (
        {"type": "function", "name": "read", "namespace": "mcp__disk__"},
        {"type": "function_call", "name": "read", "namespace": "mcp__disk__"},
    ),
    "custom in a namespace": (
        {"type": "custom", "name": "patch", "namespace": "mcp__disk__"},
        {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__disk__"},
    ),
    "allowed": (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read"}, {"type": "web_search"}],
        },
        {"type": "function_call", "name": "read"},
    ),
}


PATCH = """start: begin change+ end  // a patch
begin: "*** Begin" LF
end: "*** End" LF?
change: add
    | ("-" | "@@ ") /(.*)/ LF -> removed
add: "+" WORD~1..2 "\\"" LF
%import common.LF
%import common.WORD
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_grammar_of_a_custom_tool_binds_demanded_calls(
    server: Running, choice: Any, stream: bool
) -> None:
    definition = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    asked = {
        "input": [USER],
        **NO_THOUGHT,
        "max_output_tokens": 400,
        "seed": 1,
        "tools": [CUSTOM | {"format": definition}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "stream": stream,
    }
    reply = server.post("/v1/responses", asked)
    last = named(reply)[-1][1]["response"] if stream else reply.json
    (item,) = last["output"]
    lines = item["input"].split("\n")
    if item["status"] == "completed":  # else a long line has reached the limit of tokens
        assert lines.pop() in ("", "*** End")
        lines.remove("*** End") if "*** End" in lines else None
    assert lines[0] == "*** Begin" and len(lines) > 1
    assert all(re.match(r"\+[a-zA-Z]+\"?$|-|@@ |@?@?$|\+$", line) for line in lines[1:]), lines


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "the rule start contains itself"),
        ('start: "x"\n%ignore " "', "is not supported"),
        ("start: other", "the rule other is missing"),
    ],
)
def test_grammar_that_cannot_bind_a_demanded_call_is_refused(
    server: Running, grammar: str, reason: str
) -> None:
    definition = {"type": "grammar", "syntax": "lark", "definition": grammar}
    asked = {"tools": [FUNCTION, CUSTOM | {"format": definition}], "max_output_tokens": 2}
    for choice in (
        "required",
        {"type": "custom", "name": "patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}],
        },
    ):
        reply = server.post("/v1/responses", {"input": "a", **asked, "tool_choice": choice})
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
        assert "tools[1].format.definition is no regular" in reply.json["error"]["message"]
        assert reason in reply.json["error"]["message"]
    for choice in ("auto", {"type": "function", "name": "read"}):
        respond(server, **asked, tool_choice=choice)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a"i ["b"] "c"~2..3\n', ["Acc", "abccc"], ["ac", "acccc", "bcc"]),
        (
            "?start: x | y\nx.2: /a\\/[0-9]+/ -> n\n!y: INT? LF\n"
            "%import common.INT\n%import common.LF",
            ["a/12", "5\n", "\n"],
            ["a12", "5"],
        ),
        ('start: ("a" | "b")* "."', ["ab.", "."], ["a", "c."]),
    ],
)
def test_lark_as_an_expression(grammar: str, texts: list[str], others: list[str]) -> None:
    pattern = lark_to_regex(grammar)
    assert all(re.fullmatch(pattern, text) for text in texts), pattern
    assert not any(re.fullmatch(pattern, text) for text in others), pattern


@pytest.mark.parametrize("kind", CHOICES)
def test_calls_of_all_kinds_of_tools(server: Running, kind: str) -> None:
    """The template of this model knows no tools, so the calls have the generic format."""
    choice, expected = CHOICES[kind]
    asked = {"tools": ALL_TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    response = respond(server, **asked)
    (item,) = response["output"]
    assert item | expected == item and item["call_id"]
    assert response["status"] == "completed"
    events = named(
        server.post("/v1/responses", {"input": [USER], **NO_THOUGHT, **asked, "stream": True})
    )
    (streamed,) = events[-1][1]["response"]["output"]
    assert streamed | expected == streamed
    name = "custom_tool_call_input" if "custom" in item["type"] else "function_call_arguments"
    deltas = [event["delta"] for kind, event in events if kind == f"response.{name}.delta"]
    assert "".join(deltas) == item.get("input", item.get("arguments"))

    # The client sends the call back, with its result.
    result = item["type"] + "_output"
    history = [USER, item, {"type": result, "call_id": item["call_id"], "output": "done"}]
    assert respond(server, tools=ALL_TOOLS, input=history)["output"]


def test_tools_that_run_elsewhere_are_left_out_with_a_note(tools: Running) -> None:  # noqa: F811
    counts = [
        respond(tools, tools=listed)["usage"]["input_tokens"]
        for listed in ([FUNCTION], [*HOSTED, FUNCTION], HOSTED, [])
    ]
    assert counts[0] == counts[1] > counts[2] == counts[3]
    assert any("tools[0] has type 'web_search'" in line for line in tools.log)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": "f"}]}, "tools[0].type must be text"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name must have"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools must be a list"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name must have",
    ),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name 'read' is already used"),
    (
        {"tools": ALL_TOOLS, "tool_choice": {"type": "web_search"}},
        "tool_choice has type 'web_search', which runs at OpenAI",
    ),
    (
        {"tools": ALL_TOOLS, "tool_choice": {"type": "custom", "name": "x"}},
        "tool_choice names a function that is not among the tools",
    ),
    (
        {
            "tools": ALL_TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom"}]},
        },
        "tool_choice: allowed tool 0 is not among the tools",
    ),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name is missing"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_wrong_tools_and_choices_are_refused(
    tools: Running,  # noqa: F811
    fields: dict[str, Any],
    message: str,
) -> None:
    reply = tools.post("/v1/responses", {"input": "hello", **NO_THOUGHT, **fields})
    assert reply.status == 400 and message in reply.json["error"]["message"], reply.body


CALL = {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"}
SHELL = {"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}}
IMAGE = [{"type": "input_image", "image_url": "data:image/png;base64,x"}]
ITEMS: dict[str, list[Any]] = {
    "nothing": [],
    "references": [USER, {"type": "item_reference", "id": "rs_1"}],
    "compaction": [{"type": "compaction", "encrypted_content": "x"}, USER],
    "a search": [
        USER,
        {"type": "web_search_call", "status": "completed", "action": {"query": "x"}},
    ],
    "a new kind": [USER, {"type": "quantum_call", "output": {"a": [1]}, "arguments": 5}],
    "a shell": [USER, SHELL, {"type": "local_shell_call_output", "id": "1", "output": "a.txt"}],
    "parts": [
        USER,
        CALL,
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "x"}],
        },
    ],
    "an image of a tool": [
        USER,
        CALL,
        {"type": "function_call_output", "call_id": "1", "output": IMAGE},
    ],
    "no output": [USER, CALL, {"type": "function_call_output", "call_id": "1"}],
    "an object": [USER, CALL, {"type": "function_call_output", "call_id": "1", "output": {"a": 1}}],
    "cut arguments": [USER, CALL | {"arguments": '{"path": "a.tx'}],
    "no arguments": [USER, CALL | {"arguments": None}],
    "encrypted reasoning": [
        USER,
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        CALL,
    ],
    "a phase": [USER, {"role": "assistant", "phase": "commentary", "content": []}],
}


@pytest.mark.parametrize("kind", ITEMS)
def test_earlier_items_of_all_kinds_are_read(tools: Running, kind: str) -> None:  # noqa: F811
    limits = {"max_output_tokens": 2, "ignore_eos": True}
    response = respond(tools, input=ITEMS[kind], tools=ALL_TOOLS, **limits)
    assert response["usage"]["output_tokens"] == 2


def test_items_reach_the_template(tools: Running) -> None:  # noqa: F811
    count = respond(tools, input=ITEMS["a shell"], max_output_tokens=1)["usage"]["input_tokens"]
    call = {"function": {"name": "local_shell", "arguments": {"command": ["ls"]}}}
    plain = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "a.txt"},
    ]
    body = {"messages": plain, "chat_template_kwargs": {"enable_thinking": False}}
    assert count == tools.post("/tokenize", body).json["count"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"in', '{"in'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_input_of_cut_custom_calls(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_of_chat_completions(server: Running, mode: str) -> None:
    chosen = [{"type": "function", "function": {"name": "time"}}]
    body = {
        "messages": [USER],
        "tools": TOOLS,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": chosen},
        },
        "max_tokens": 60,
    }
    reply = server.post("/v1/chat/completions", body)
    alone = server.post(
        "/v1/chat/completions", body | {"tools": [TOOLS[1]], "tool_choice": mode, "max_tokens": 1}
    )
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["prompt_tokens"] == alone.json["usage"]["prompt_tokens"]
    if mode == "required":
        calls = reply.json["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"time"}


READ = {"name": "read", "input_schema": ONE_VALUE}
USE = {"type": "tool_use", "id": "1", "name": "read", "input": {"a": 1}}
SEARCH_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
TEXT_FILE = {"type": "text", "media_type": "text/plain", "data": "sun"}
TEXT = {"type": "text", "text": "x"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "eA=="}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": list(content)}


def turns(*blocks: Any) -> list[Any]:
    """A conversation that ends with the result of a call."""
    used = {"role": "assistant", "content": [USE]}
    return [USER, used, {"role": "user", "content": list(blocks)}]


def addition(tool: dict[str, Any], kind: str = "tool_addition") -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


DEFINITION = {"type": "tool_definition", "definition": READ | {"name": "late"}}
REFERENCE = {"type": "tool_reference", "name": "read"}
BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "a document": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": TEXT_FILE}]}]},
        "user: sun|",
    ),
    "a document of blocks": (
        {
            "messages": turns(
                result({"type": "document", "title": "T", "source": {"content": [{"text": "x"}]}})
            )
        },
        "tool: T\nx|",
    ),
    "a search result": (
        {
            "messages": turns(
                result(
                    {
                        "type": "search_result",
                        "source": "s.org",
                        "title": "T",
                        "content": [{"type": "text", "text": "x"}],
                    }
                )
            )
        },
        "tool: T\ns.org\nx|",
    ),
    "a tool reference": (
        {"messages": turns(result({"type": "tool_reference", "tool_name": "read"}))},
        "tool: The tool read is available.|",
    ),
    "an image of a tool": (
        {
            "messages": turns(
                result({"type": "image", "source": PDF}, {"type": "text", "text": "x"})
            )
        },
        "tool: [image left out: this model reads only text]\nx|",
    ),
    "a search of the server": (
        {
            "tools": [SEARCH_TOOL],
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{}]},
                        {"type": "text", "text": "found"},
                    ],
                },
                USER,
            ],
        },
        "user: hello|assistant: found|user: hello|",
    ),
    "malformed input": (
        {"messages": [USER, {"role": "assistant", "content": [USE | {"input": [1]}]}, USER]},
        "assistant: read {}|",
    ),
    "a new tool": (
        {"messages": [USER, addition(DEFINITION)]},
        '"name": "late"',
    ),
    "a tool that is there": (
        {"messages": [USER, addition(REFERENCE)], "tools": [READ]},
        "system: The tool read is now available.|",
    ),
    "a late system message": (
        {"messages": [USER, USER, {"role": "system", "content": "be brief"}]},
        "user: hello|system: be brief|user: hello|",
    ),
    "a late system message before an answer": (
        {
            "messages": [
                USER,
                {"role": "system", "content": "be brief"},
                {"role": "assistant", "content": "yes"},
                USER,
            ]
        },
        "system: be brief|user: hello|assistant: yes|user: hello|",
    ),
    "a tool that goes": (
        {"messages": [USER, addition(REFERENCE, "tool_removal")], "tools": [READ]},
        "no longer available.|",
    ),
    "a billing header": (
        {"messages": [USER], "system": "x-anthropic-billing-header: cch=1;\nbe brief"},
        "system: be brief|",
    ),
    "a billing header in blocks": (
        {
            "messages": [USER],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "be brief"},
            ],
        },
        "system: be brief|",
    ),
}


PROMPTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}|{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def reader() -> Iterator[PromptReader]:
    reader = PromptReader("m", tiny_tokenizer(), PROMPTS, Renderer(), 4096)
    yield reader
    reader.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_all_kinds_are_read(server: Running, reader: PromptReader, kind: str) -> None:
    body, expected = BLOCKS[kind]
    body = {"max_tokens": 2} | body
    reply = server.post("/v1/messages", body)
    assert reply.status == 200, reply.body
    chat = AnthropicChat(msgspec.convert(body, MessagesRequest))
    prompt = reader.read_chat(chat.messages, tools=chat.tools, places=chat.places).text
    assert prompt and expected in prompt
    assert "billing" not in prompt and "web_search" not in prompt
    assert ('"name": "read"' in prompt) == (kind == "a tool that is there")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]},
            "messages[0].content[0] has type 'document', but this model reads only text",
        ),
        (
            {"messages": [USER, addition({"type": "tool_definition", "definition": {"name": 1}})]},
            "messages[1].content[0].tool.definition: Expected `str | null`",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name is missing"),
        ({"tools": [READ, READ]}, "tools[1].name 'read' is already used"),
        ({"messages": turns(result({"text": "x"}))}, "messages[2].content[0].content[0]: Object"),
    ],
)
def test_wrong_blocks_are_refused(server: Running, fields: dict[str, Any], message: str) -> None:
    reply = server.post("/v1/messages", {"max_tokens": 2, "messages": [USER], **fields})
    assert reply.status == 400 and message in reply.json["error"]["message"], reply.body


def test_a_changing_line_keeps_the_cached_prefix(server: Running) -> None:
    usage = []
    for number in (1, 2):
        header = {
            "type": "text",
            "text": f"x-anthropic-billing-header: v=2; cch={number};",
        }
        system = [header, {"type": "text", "text": "Be a careful assistant. " * 8}]
        body = {"max_tokens": 1, "messages": [USER], "system": system}
        usage.append(server.post("/v1/messages", body).json["usage"])
    total = usage[0]["input_tokens"] + usage[0]["cache_read_input_tokens"]
    assert usage[1]["cache_read_input_tokens"] >= total - 33


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
REPEATED = "\n".join([WEATHER, CLOCK, WEATHER, CLOCK])
AFTER_TEXT = f"Well.\n{WEATHER}\n{WEATHER}\n{WEATHER}"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ScriptedModel]]:
    path: Path = tmp_path_factory.mktemp("agents") / "scripted.gguf"
    template = "{{ messages[-1].content }}{# <tool_call> #}"
    model = ScriptedModel(path, [AFTER_TEXT, REPEATED, '{"n": 3}'], template=template)
    running = Running(str(path), "--threads", "1", "--kv-blocks", "64")
    yield running, model
    assert running.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 20, 60])
def test_one_call_without_parallel_calls(
    scripted: tuple[Running, ScriptedModel], stream: bool, cut: int
) -> None:
    """A further call is dropped in `auto` mode, also when the length cuts it."""
    running, model = scripted
    content = "x" * model.starts[0]
    length = model.lengths[0] - cut
    body = {"max_tokens": length, "tools": TOOLS, "stream": stream}
    chat = running.post(
        "/v1/chat/completions",
        body | {"messages": [USER | {"content": content}], "parallel_tool_calls": False},
    )
    calls, reason = _calls_and_reason(chat, stream)
    assert (calls, reason) == (['{"city": "Bern"}'], "tool_calls")
    anthropic_tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = running.post(
        "/v1/messages",
        body
        | {
            "messages": [USER | {"content": content}],
            "tools": anthropic_tools,
            "tool_choice": choice,
        },
    )
    assert message.body.count(b'"type":"tool_use"') == 1 and b'"stop_reason":"tool_use"' in (
        message.body
    ), message.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_repeated_call_ends_a_demanded_output(
    scripted: tuple[Running, ScriptedModel], stream: bool, n: int
) -> None:
    """Its tokens end with the repeat, in whichever steps they came."""
    running, model = scripted
    second = f"{CLOCK}\n{WEATHER}"
    content = "x" * model.starts[1]
    limits = {"temperature": 0, "stream": stream}
    length = model.lengths[1]
    names = ("weather", "clock")
    schema = {"type": "object"}
    body = {
        **limits,
        "max_tokens": length,
        "messages": [USER | {"content": content}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
        ],
        "tool_choice": "required",
        "n": n,
        "return_token_ids": True,
        "stop": ["}}!"],
    }
    chat = running.post("/v1/chat/completions", body)
    for index in range(n):
        calls, reason = _calls_and_reason(chat, stream, index)
        assert (calls, reason) == (['{"city": "Bern"}', "{}"], "tool_calls")
    if not stream:
        kept = len(f"{WEATHER}\n{second}") - len("}\n</tool_call>")
        assert [len(choice["token_ids"]) for choice in chat.json["choices"]] == [kept] * n
        assert chat.json["usage"]["completion_tokens"] == kept * n
    until(running.at_rest)
    message = running.post(
        "/v1/messages",
        {
            **limits,
            "max_tokens": length,
            "messages": body["messages"],
            "tools": [{"name": name, "input_schema": schema} for name in names],
            "tool_choice": {"type": "any"},
        },
    )
    assert message.body.count(b'"type":"tool_use"') == 2, message.body
    assert b'"stop_reason":"tool_use"' in message.body
    items = running.post(
        "/v1/responses",
        {
            **limits,
            "input": content,
            "max_output_tokens": length,
            "tools": [FUNCTION | {"name": name, "parameters": schema} for name in names],
            "tool_choice": "required",
        },
    )
    last = named(items)[-1][1]["response"] if stream else items.json
    assert [item["name"] for item in last["output"]] == list(names), last
    assert last["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [True, False])
def test_a_format_allows_calls_in_auto_mode(
    scripted: tuple[Running, ScriptedModel], stream: bool, calls: bool
) -> None:
    """The model calls the tool, or its text has the format."""
    running, model = scripted
    content = "x" * model.starts[1 if calls else 2]
    length = len(WEATHER) + 2 if calls else 12
    limits = {"temperature": 0, "stream": stream}
    schema = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"]}
    text_format = {"type": "json_schema", "name": "n", "schema": schema}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "parameters": parameters}
    messages = [USER | {"content": content}]
    body = {
        **limits,
        "max_tokens": length,
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": text_format},
    }
    chat = running.post("/v1/chat/completions", body)
    message = running.post(
        "/v1/messages",
        {
            **limits,
            "max_tokens": length,
            "messages": messages,
            "tools": [{"name": "weather", "input_schema": parameters}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    )
    items = running.post(
        "/v1/responses",
        {
            **limits,
            "input": content,
            "max_output_tokens": length,
            "tools": [{"type": "function", **function}],
            "parallel_tool_calls": False,
            "text": {"format": text_format},
        },
    )
    last = named(items)[-1][1]["response"] if stream else items.json
    (item,) = last["output"]
    if calls:
        assert _calls_and_reason(chat, stream) == (['{"city": "Bern"}'], "tool_calls")
        assert b'"stop_reason":"tool_use"' in message.body
        assert (item["type"], item["arguments"]) == ("function_call", '{"city": "Bern"}')
    else:
        assert b"tool_call" not in chat.body and b"tool_use" not in message.body
        assert b'"finish_reason":"stop"' in chat.body and b'"end_turn"' in message.body
        assert json.loads(item["content"][0]["text"])["n"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_length_cuts(scripted: tuple[Running, ScriptedModel], stream: bool) -> None:
    running, model = scripted
    body = {"tools": TOOLS, "stream": stream}
    content = "x" * model.starts[0]
    for cut in (1 + len("</tool_call>") // 2, len('"Bern"}}\n</tool_call>')):
        length = model.lengths[0] - 1 - cut
        reply = running.post(
            "/v1/chat/completions",
            body | {"messages": [USER | {"content": content}], "max_tokens": length},
        )
        calls, reason = _calls_and_reason(reply, stream)
        assert reason == "length" and len(calls) == 3
        assert calls[:2] == ['{"city": "Bern"}'] * 2 and calls[0].startswith(calls[2])
        assert b"</tool" not in reply.body
        body_of_messages = {
            "messages": [USER | {"content": content}],
            "max_tokens": length,
            "stream": stream,
            "tools": [{"name": "weather"}],
        }
        assert b'"stop_reason":"max_tokens"' in running.post("/v1/messages", body_of_messages).body
        items = running.post(
            "/v1/responses",
            {
                "input": content,
                "max_output_tokens": length,
                "stream": stream,
                "tools": [FUNCTION | {"name": "weather"}],
            },
        )
        last = named(items)[-1][1]["response"] if stream else items.json
        assert (last["status"], last["output"][-1]["status"]) == ("incomplete", "incomplete")
        assert last["output"][-1]["arguments"] == calls[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_without_a_name(
    scripted: tuple[Running, ScriptedModel], stream: bool
) -> None:
    """The length cuts a call before the name of one of two tools: an empty message is left."""
    running, _ = scripted
    names = ("weather", "clock")
    reply = running.post(
        "/v1/responses",
        {
            "input": "x",
            "max_output_tokens": 1,
            "stream": stream,
            "tools": [FUNCTION | {"name": name} for name in names],
            "tool_choice": "required",
        },
    )
    last = named(reply)[-1][1]["response"] if stream else reply.json
    (item,) = last["output"]
    assert (item["type"], item["status"]) == ("message", "incomplete")
    assert [part["text"] for part in item["content"]] == [""]


def test_tools_that_the_server_turned_off(model: str) -> None:
    flags = ("--tool-call-parser", "none", "--threads", "1", "--kv-blocks", "64")
    quiet = Running(model, *flags)
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 2}
    refused = quiet.post("/v1/chat/completions", body)
    served = quiet.post("/v1/chat/completions", body | {"tool_choice": "none"})
    assert quiet.stop() == 0
    assert (refused.status, served.status) == (400, 200)
    assert refused.json["error"]["message"].startswith("tools are turned off on this server")
    assert refused.json["error"]["param"] == "tools"


def _calls_and_reason(reply: Reply, stream: bool, index: int = 0) -> tuple[list[str], str]:
    """Return the arguments of each call, and the finish reason."""
    assert reply.status == 200, reply.body
    if not stream:
        choice = reply.json["choices"][index]
        calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        return calls, choice["finish_reason"]
    choices = [event["choices"][0] for event in reply.events[:-1]]
    choices = [choice for choice in choices if choice["index"] == index]
    found: dict[int, str] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls", []):
            found[call["index"]] = found.get(call["index"], "") + call["function"]["arguments"]
    return list(found.values()), choices[-1]["finish_reason"]
