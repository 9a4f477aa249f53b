"""The table of fields: it has every field of the clients' own types and of the peers' servers, and
the server refuses by it. `python -m tests.server.test_fields` writes docs/reference/fields.md.
"""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import beta as anthropic
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.chat import completion_create_params as chat
from openai.types.responses import FunctionToolParam, response_create_params
from typing_extensions import is_typeddict

from headrace.server import field_rows as rows
from headrace.server.errors import ApiError
from headrace.server.field_table import PROMPTS, RECORDS, REPLAYED, Row, refuse_unserved, table
from tests.server.peer_fields import PEER_FIELDS
from tests.server.running import Running
from tests.texts import ROOT

PAGE = ROOT / "docs/reference/fields.md"
OTHER_TOOLS = ("tools",)
"""A union of many kinds. The tests look at functions alone."""

CLIENT_TYPES = [
    (rows.CHAT, chat.CompletionCreateParamsStreaming),
    (rows.CHAT, ("tools[]", ChatCompletionFunctionToolParam)),
    (rows.TEXT, completion_create_params.CompletionCreateParamsStreaming),
    (rows.RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    (rows.RESPONSES, ("tools[]", FunctionToolParam)),
    (rows.EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
    (rows.MESSAGES, message_create_params.MessageCreateParamsStreaming),
    (rows.MESSAGES, anthropic.message_create_params.MessageCreateParamsStreaming),
    (rows.MESSAGES, ("tools[]", anthropic.BetaToolParam)),
    (rows.COUNT, message_count_tokens_params.MessageCountTokensParams),
    (rows.COUNT, anthropic.message_count_tokens_params.MessageCountTokensParams),
]


def paths_of(kind: Any, prefix: str = "", seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Yield the paths of a typed dictionary's fields, with the fields of objects in it."""
    if is_typeddict(kind):
        for name, inner in get_type_hints(kind).items():
            yield prefix + name
            if kind not in seen and (prefix or name not in (*REPLAYED, *OTHER_TOOLS)):
                yield from paths_of(inner, f"{prefix}{name}.", seen | {kind})
        return
    is_list = get_origin(kind) is not None and "Iterable" in str(get_origin(kind))
    is_list = is_list or get_origin(kind) in (list,)
    for argument in get_args(kind):
        yield from paths_of(argument, prefix[:-1] + "[]." if is_list else prefix, seen)


def is_covered(path: str, by_path: dict[str, Row]) -> bool:
    """Whether a path has a row, or one of its objects is ignored, refused or read as it is."""
    if path in by_path:
        return True
    parent = path.rpartition(".")[0]
    found = by_path.get(parent) or by_path.get(parent.removesuffix("[]"))
    if found and found.status != "served":
        return True
    if found and not any(other.startswith(parent) and other != found.path for other in by_path):
        return True
    return bool(parent) and "." in parent and is_covered(parent, by_path)


@pytest.mark.parametrize(("api", "kind"), CLIENT_TYPES)
def test_table_has_every_field_of_the_clients(api: str, kind: Any) -> None:
    prefix, kind = kind if isinstance(kind, tuple) else ("", kind)
    by_path = {row.path: row for row in table(api)}
    paths = set(paths_of(kind, prefix and f"{prefix}."))
    assert len(paths) > 3
    assert not {path for path in paths if not is_covered(path, by_path)}


@pytest.mark.parametrize(("peer", "api"), PEER_FIELDS)
def test_table_has_every_field_of_the_peers(peer: str, api: str) -> None:
    assert not {*PEER_FIELDS[peer, api]} - {row.path for row in table(api)}


@pytest.mark.parametrize("api", rows.GENERATING)
def test_table_has_the_fields_of_the_other_apis(api: str) -> None:
    """A field that is served elsewhere would be dropped without a word."""
    own = {row.path.partition(".")[0].removesuffix("[]") for row in table(api)}
    others = {row.path for other in rows.GENERATING for row in table(other)}
    served = {
        row.path.partition(".")[0].removesuffix("[]")
        for other in rows.GENERATING
        for row in table(other)
        if row.status == "served"
    }
    assert served - own <= {*PROMPTS}
    assert {*rows.COUNTERPARTS[api]} <= others


@pytest.mark.parametrize("api", RECORDS)
def test_each_field_has_one_row(api: str) -> None:
    paths = [row.path for row in table(api)]
    assert len(paths) == len({*paths})
    assert not {row.path for row in table(api) if row.status != "served" and not row.reason}


def nested(path: str, value: Any) -> Any:
    """An object with the value at a path."""
    name, _, rest = path.partition(".")
    inner = nested(rest, value) if rest else value
    is_list = name.endswith("[]")
    return {name.removesuffix("[]"): [inner] if is_list else inner}


@pytest.mark.parametrize("api", RECORDS)
def test_refused_fields_are_named(api: str) -> None:
    for path in (row.path for row in table(api) if row.status == "refused"):
        with pytest.raises(ApiError) as caught:
            refuse_unserved(json.dumps(nested(path, {"a": "b"})).encode(), RECORDS[api])
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        assert caught.value.message.startswith(path.replace("[]", ""))
        assert caught.value.param == path.partition(".")[0].removesuffix("[]")
        if path not in rows.MEANT:
            refuse_unserved(json.dumps(nested(path, False)).encode(), RECORDS[api])
        for value in (None, *rows.NEUTRAL.get(path, ())):
            refuse_unserved(json.dumps(nested(path, value)).encode(), RECORDS[api])


def test_ignored_fields_change_nothing(server: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    body |= {"temperature": 0}
    more = {"store": True, "user": "me", "service_tier": "auto", "metadata": {"a": "b"}}
    plain = server.post("/v1/chat/completions", body).json["choices"]
    assert server.post("/v1/chat/completions", body | more).json["choices"] == plain


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"n_predict": 0}, "n_predict"),
        ("/v1/chat/completions", {"separate_reasoning": False}, "separate_reasoning"),
        ("/v1/chat/completions", {"modalities": ["audio"], "audio": {"voice": "x"}}, "audio"),
        ("/v1/completions", {"suffix": "b"}, "suffix"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/embeddings", {"dimensions": 5}, "dimensions"),
        ("/v1/responses", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/responses", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("/v1/responses", {"max_tokens": 3}, "max_tokens"),
        ("/v1/chat/completions", {"max_output_tokens": 3}, "max_output_tokens"),
        ("/v1/chat/completions", {"system": "be brief"}, "system"),
        ("/v1/chat/completions", {"think": False}, "think"),
        ("/v1/chat/completions", {"options": {"num_ctx": 9}}, "options"),
        ("/v1/completions", {"max_completion_tokens": 3}, "max_completion_tokens"),
        ("/v1/messages", {"stop": ["a"]}, "stop"),
        ("/v1/messages", {"seed": 3}, "seed"),
        ("/v1/messages", {"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_refusals_over_http(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    if path == "/v1/responses":
        base: dict[str, Any] = {"input": "a", "max_output_tokens": 1}
    else:
        base = {"prompt": "a", "input": "a", "messages": messages, "max_tokens": 1}
    error = server.post(path, base | body)
    assert error.status == 400, error.body
    assert error.json["error"]["message"].startswith(f"{param} is not supported: "), error.body
    assert error.json["error"].get("param", param) == param  # Anthropic's errors have none


def test_whole_floats_are_integers(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 2.0, "ignore_eos": True}
    assert server.post("/v1/completions", body).json["usage"]["completion_tokens"] == 2
    error = server.post("/v1/completions", body | {"max_tokens": 2.5})
    assert (error.status, error.json["error"]["param"]) == (400, "max_tokens")


INTRODUCTION = """\
# Fields of requests

Every field of OpenAI's and Anthropic's Python clients and of the servers of vLLM, SGLang and
llama.cpp is in one table. An API refuses the fields that only other APIs have, and names its own
in their place. The server serves the field, ignores it because it changes no answer, or
refuses the request with the field's name. It takes a refused field whose value asks for nothing:
null, 0, false or an empty list. It ignores a field that is in no table.

The parts of `messages`, `input` and `system` are not in the tables.
"""
ROUTES = {
    rows.CHAT: "/v1/chat/completions",
    rows.TEXT: "/v1/completions",
    rows.RESPONSES: "/v1/responses",
    rows.MESSAGES: "/v1/messages",
    rows.COUNT: "/v1/messages/count_tokens",
    rows.EMBEDDINGS: "/v1/embeddings",
    rows.TOKENIZE: "/tokenize",
    rows.DETOKENIZE: "/detokenize",
}


def section(api: str) -> str:
    by_status: dict[str, list[Row]] = {"served": [], "ignored": [], "refused": []}
    for row in table(api):
        by_status[row.status].append(row)
    parts = [f"## `POST {ROUTES[api]}`"]
    parts.append("Served: " + ", ".join(f"`{row.path}`" for row in by_status["served"]) + ".")
    for status in ("ignored", "refused"):
        if by_status[status]:
            by_reason: dict[str, list[str]] = {}
            for row in by_status[status]:
                by_reason.setdefault(row.reason, []).append(f"`{row.path}`")
            lines = [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
            parts.append("\n".join([f"| {status} | why |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    return "\n".join([INTRODUCTION, *map(section, RECORDS)])


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
