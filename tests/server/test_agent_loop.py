"""An agent's loop over all chat APIs: the model calls a tool, reads its result, and answers.

The default model is forced to call. `make test-agents QWEN=FILE` runs the loop with
Qwen2.5-Coder-0.5B-Instruct, which calls by itself.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.running import Running, running

QWEN = os.environ.get("HEADRACE_QWEN", "")
MAX_TURNS = 4
FILES = {"note.txt": "The secret number is 42."}
NAME, ABOUT = "read_file", "Read a text file of the user, and return its text."
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": list(FILES)}},
    "required": ["path"],
    "additionalProperties": False,
}
SYSTEM = "You help with files. Call a tool to read a file, then answer from its text."
QUESTION = "Which number is in note.txt? Read the file first."
Calls = list[tuple[str, str, str]]
Turn = tuple[list[Any], str, Calls]
"""Messages to send back, the text, and calls as id, name and arguments."""


def chat(server: Running, messages: list[Any], choice: str) -> Turn:
    function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    (found,) = post(server, "/v1/chat/completions", body)["choices"]
    message = found["message"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    assert found["finish_reason"] == ("tool_calls" if calls else "stop") or not calls
    return [message], message["content"] or "", calls


def responses(server: Running, messages: list[Any], choice: str) -> Turn:
    body = {
        "instructions": SYSTEM,
        "input": messages,
        "tools": [
            {"type": "function", "name": NAME, "description": ABOUT, "parameters": SCHEMA},
            {"type": "web_search"},
        ],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 100,
        "temperature": 0,
    }
    items = post(server, "/v1/responses", body)["output"]
    calls = [
        (item["call_id"], item["name"], item["arguments"])
        for item in items
        if item["type"] == "function_call"
    ]
    texts = [part["text"] for item in items for part in item.get("content", [])]
    return items, "".join(texts), calls


def messages_api(server: Running, messages: list[Any], choice: str) -> Turn:
    kind = {"required": "any"}.get(choice, choice)
    body = {
        "system": SYSTEM,
        "messages": messages,
        "tools": [{"name": NAME, "description": ABOUT, "input_schema": SCHEMA}],
        "tool_choice": {"type": kind, "disable_parallel_tool_use": True},
        "max_tokens": 100,
        "temperature": 0,
    }
    blocks = post(server, "/v1/messages", body)["content"]
    calls = [
        (block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return [{"role": "assistant", "content": blocks}], "".join(texts), calls


def chat_result(call_id: str, text: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def responses_result(call_id: str, text: str) -> Any:
    output = [{"type": "input_text", "text": text}]
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def messages_result(call_id: str, text: str) -> Any:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
    return {"role": "user", "content": [block]}


Ask = Callable[[Running, list[Any], str], Turn]
APIS: dict[str, tuple[Ask, Callable[[str, str], Any]]] = {
    "chat": (chat, chat_result),
    "responses": (responses, responses_result),
    "messages": (messages_api, messages_result),
}


def post(server: Running, path: str, body: Any) -> Any:
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json


def run_agent(server: Running, api: str, choices: list[str]) -> tuple[str, list[str]]:
    """Return the answer and the paths that the model read; `choices` are of the first turns."""
    ask, result = APIS[api]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    paths = []
    for turn in range(MAX_TURNS):
        said, text, calls = ask(server, messages, choices[min(turn, len(choices) - 1)])
        if not calls:
            return text, paths
        messages += said
        for call_id, name, arguments in calls:
            assert name == NAME
            path = json.loads(arguments)["path"]
            paths.append(path)
            messages.append(result(call_id, FILES.get(path, "there is no such file")))
    raise AssertionError(f"the model calls without end: {paths}")


@pytest.fixture(scope="module")
def default_model() -> Iterator[Running]:
    yield from running("smollm2", "--max-model-len", "1024", "--kv-blocks", "128")


def test_forced_calls_of_the_default_model(default_model: Running) -> None:
    answers = {api: run_agent(default_model, api, ["required", "none"]) for api in APIS}
    text, paths = answers["chat"]
    assert text and paths == ["note.txt"]
    assert all(answer == answers["chat"] for answer in answers.values())


@pytest.mark.skipif(not QWEN, reason="make test-agents QWEN=FILE runs it")
@pytest.mark.parametrize("api", APIS)
def test_calls_that_the_model_makes_by_itself(qwen: Running, api: str) -> None:
    text, paths = run_agent(qwen, api, ["auto"])
    assert paths[0] == "note.txt" and "42" in text


@pytest.fixture(scope="module")
def qwen() -> Iterator[Running]:
    yield from running(QWEN, "--max-model-len", "4096", "--kv-blocks", "256")
