"""Messages of all forms reach a template in the form that it reads; others are refused."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from headrace.checkpoint.folder import chat_templates
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.named_tokens import named_tokens
from headrace.checkpoint.templates import Renderer
from headrace.checkpoint.tokenizer import Tokenizer, Vocabulary
from headrace.errors import RequestError
from headrace.messages import MessageError, is_message, normalise_messages, plain
from headrace.prompts import PromptReader
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

CHATML = "{% for m in messages %}<{{ m['role'] + '>' + m['content'] }}{% endfor %}"
DEFINED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% endfor %}"
)
EITHER = AS_TEXT.replace(
    "c.function.name + c.function.arguments",
    "c.function.name + (c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson)",
)
NULL_CONTENT = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments }}]{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}|{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
).replace("{{ part.text }}|", "{{ part.text }}")
ONLY_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
ROLES = (
    "{% for m in messages %}{% if m.role in ['developer', 'system'] %}[{{ m.role }}]{{ m.content }}"
    "{% elif m.role == 'user' %}<user>{{ m.content }}{% else %}"
    "{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
MAPPINGS = (
    "{% for m in messages %}{{ m.content | tojson if m.content is mapping else m.content }}"
    "{% endfor %}"
)


class Role(StrEnum):
    USER = "user"


@dataclass
class Turn:
    role: str
    content: Any
    tool_calls: Any = None


class Dumped:
    """Like a message of OpenAI's client, a Pydantic model."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def call(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [
        user("hi"),
        {"role": "assistant", "tool_calls": [{"id": "1", "function": function}], **fields},
    ]


TEXTS = [{"type": "text", "text": "hi "}, {"type": "input_text", "text": "you"}]
FLAT = [user("hi"), {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}]
OLD = [user("hi"), {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}}]

THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
ONE_THOUGHT = THOUGHTS.replace(
    "<{{ m",
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<{{ m",
)
"""As gpt-oss: a call follows reasoning or content, not both."""
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NO_RESULTS = CHATML.replace(
    "<{{ m", "{% if m.role == 'tool' %}{{ raise_exception('tool') }}{% endif %}<{{ m"
)
MENDED: list[tuple[Any, str]] = [
    ('{"path": "a.tx', "{}"),
    (" ", "{}"),
    ("ls -l", "{}"),
    ("[1]", "{}"),
    ('"x"', "{}"),
    ("42", "{}"),
    ("null", "{}"),
    ([1], "{}"),
    (42, "{}"),
    ("[" * 50_000, "{}"),
    ('{"a": NaN, "b": [1e999, 1]}', '{"a": null, "b": [null, 1]}'),
    ({"a": float("inf")}, '{"a": null}'),
    (json.dumps('{"a": 1}'), '{"a": 1}'),
]

FORMS: dict[str, tuple[str, list[Any], str]] = {
    "null keys": (
        DEFINED,
        [user("hi", name=None), {"role": "assistant", "content": "ho", "tool_calls": None}],
        "<user>hi<assistant>ho",
    ),
    "null content": (CHATML, [user(None)], "<user>"),
    "no content": (CHATML, [{"role": "user"}], "<user>"),
    "null content next to calls": (
        DEFINED,
        call({"a": 1}, content=None),
        '<user>hi<assistant>[add {"a": 1}]',
    ),
    "calls of a template without them": (
        CHATML,
        call({"a": 1}),
        f"<user>hi<assistant>{CALL_TEXT}",
    ),
    "text and calls of a template without them": (
        CHATML,
        call('{"a": 1}', content="I add."),
        f"<user>hi<assistant>I add.\n{CALL_TEXT}",
    ),
    "a result that a template refuses": (
        NO_RESULTS,
        [*call({"a": 1}), {"role": "tool", "content": [{"type": "text", "text": "2"}]}],
        f"<user>hi<assistant>{CALL_TEXT}<user><tool_response>\n2\n</tool_response>",
    ),
    "an image of a tool": (
        CHATML,
        [{"role": "tool", "content": [{"type": "image_url", "image_url": {}}, *TEXTS[1:]]}],
        "<tool>[image_url left out: this model reads only text]\nyou",
    ),
    **{
        f"arguments {given!r}": (DEFINED, call(given), f"<user>hi<assistant>[add {mended}]")
        for given, mended in MENDED
    },
    "calls only with null content": (
        NULL_CONTENT,
        call('{"a": 1}', content=""),
        '<user>hi[add{"a": 1}]',
    ),
    "a result that is a list": (
        CHATML,
        [{"role": "tool", "content": [{"a": 1}, "é"]}],
        '<tool>[{"a": 1}, "é"]',
    ),
    "a result that is a number": (CHATML, [{"role": "tool", "content": 5}], "<tool>5"),
    "an assistant's object": (
        CHATML,
        [{"role": "assistant", "content": {"a": 1}}],
        '<assistant>{"a": 1}',
    ),
    "reasoning in parts": (
        THOUGHTS,
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": TEXTS}, *TEXTS[1:]]}],
        "<assistant>(hi you)you",
    ),
    "reasoning and text before a call": (
        ONE_THOUGHT,
        call({"a": 1}, content="I add.", reasoning_content="Hm."),
        "<user>hi<assistant>(Hm.\n\nI add.)add",
    ),
    "no calls": (DEFINED, [user("hi", tool_calls=[])], "<user>hi"),
    "text arguments of objects": (DEFINED, call('{"a":1}'), '<user>hi<assistant>[add {"a": 1}]'),
    "object arguments of text": (
        AS_TEXT,
        call({"a": "é"}, content=""),
        '<user>hi<assistant>add{"a": "é"}',
    ),
    "text arguments as given": (EITHER, call('{"a":1}'), '<user>hi<assistant>add{"a":1}'),
    "object arguments as given": (EITHER, call({"a": 1}), '<user>hi<assistant>add{"a": 1}'),
    "empty arguments": (AS_TEXT, call(""), "<user>hi<assistant>add{}"),
    "null arguments": (DEFINED, call(None), "<user>hi<assistant>[add {}]"),
    "a call without function": (DEFINED, FLAT, '<user>hi<assistant>[add {"a": 1}]'),
    "a function call": (DEFINED, OLD, '<user>hi<assistant>[add {"a": 1}]'),
    "parts for text": (CHATML, [user(TEXTS)], "<user>hi \nyou"),
    "parts for parts": (PARTS, [user(TEXTS)], "<user>hi you"),
    "parts for only parts": (ONLY_PARTS, [user(TEXTS)], "<user>hi you"),
    "text for only parts": (ONLY_PARTS, [user("hi")], "<user>hi"),
    "text for parts": (PARTS, [user("hi")], "<user>hi"),
    "plain texts as parts": (CHATML, [user(["a", {"text": "b"}])], "<user>a\nb"),
    "no parts": (CHATML, [user([])], "<user>"),
    "keys of parts": (PARTS, [user([{"type": "text", "text": "a", "image": None}])], "<user>a"),
    "a refusal": (
        CHATML,
        [{"role": "assistant", "content": None, "refusal": "no"}],
        "<assistant>no",
    ),
    "a developer": (CHATML, [{"role": "developer", "content": "x"}, user("y")], "<system>x<user>y"),
    "a known developer": (
        ROLES,
        [{"role": "developer", "content": "x"}, user("y")],
        "[developer]x<user>y",
    ),
    "a function's result": (
        CHATML,
        [*OLD, {"role": "function", "name": "add", "content": "1"}],
        f"<user>hi<assistant>{CALL_TEXT}<tool>1",
    ),
    "an object of a tool": (CHATML, [{"role": "tool", "content": {"a": "é"}}], '<tool>{"a": "é"}'),
    "an object as it is": (MAPPINGS, [{"role": "tool", "content": {"a": "é"}}], '{"a": "é"}'),
    "thinking parts": (
        "{{ messages[0].reasoning_content }}|{{ messages[0].content }}",
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, *TEXTS]}],
        "hm|hi \nyou",
    ),
    "a dataclass": (CHATML, [Turn("user", "hi")], "<user>hi"),
    "a model": (DEFINED, [Dumped(role=Role.USER, content="hi", tool_calls=None)], "<user>hi"),
    "models in a dictionary": (
        DEFINED,
        [
            user("hi"),
            {
                "role": "assistant",
                "tool_calls": [
                    Dumped(id="1", function=Dumped(name="add", arguments='{"a": 1}'), index=None)
                ],
            },
        ],
        '<user>hi<assistant>[add {"a": 1}]',
    ),
}
RENDERER = Renderer()


@pytest.fixture(scope="module", autouse=True)
def renderer() -> Iterator[None]:
    """Make the renderer anew if a worker returns to this module after another one."""
    global RENDERER
    RENDERER = Renderer()
    yield
    RENDERER.close()


SYSTEM, MORE = {"role": "system", "content": "S"}, {"role": "system", "content": "T"}
DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "D"}]}
YES = {"role": "assistant", "content": "yes"}
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% elif m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = CHATML.replace(
    "<{{ m", "{% if m.role == 'system' %}{{ raise_exception('system') }}{% endif %}<{{ m"
)
DROPS_LATE = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or loop.first %}"
    "<{{ 'developer' if m.role == 'developer' else m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ROLE_FOLDS: dict[str, tuple[str, list[Any], str]] = {
    "lenient": (CHATML, [SYSTEM, MORE, user("x"), MORE], "<system>S<system>T<user>x<system>T"),
    "two systems": (ONE_SYSTEM, [SYSTEM, MORE, user("x")], "<system>S\n\nT<user>x"),
    "a late system": (
        ONE_SYSTEM,
        [SYSTEM, user("x"), YES, MORE, user("y"), DEVELOPER],
        "<system>S\n\nT\n\nD<user>x<assistant>yes<user>y",
    ),
    "only a late system": (
        ONE_SYSTEM,
        [user("x"), YES, MORE, user("y")],
        "<system>T<user>x<assistant>yes<user>y",
    ),
    "a dropped system": (DROPS_LATE, [SYSTEM, user("x"), MORE], "<system>S\n\nT<user>x"),
    "no system": (NO_SYSTEM, [SYSTEM, user("x"), YES, MORE], "<user>S\n\nT\n\nx<assistant>yes"),
    "a repeated user": (
        ALTERNATES,
        [SYSTEM, user("x"), user(TEXTS), YES, {"role": "assistant", "content": "no"}, user("z")],
        "<user>S\n\nx\n\nhi \nyou<assistant>yes\n\nno<user>z",
    ),
}


@pytest.mark.parametrize("fold", ROLE_FOLDS)
def test_roles_are_folded_as_the_template_takes_them(fold: str) -> None:
    template, messages, expected = ROLE_FOLDS[fold]
    rendering = RENDERER.render(template, normalise_messages(messages), named_tokens={})
    assert rendering.text == expected
    assert bool(rendering.notes) == (fold != "lenient")


def test_errors_name_the_place_before_the_fold() -> None:
    template = ONE_SYSTEM + "{% if messages[-1].content == 'z' %}{{ messages[-1].x.y }}{% endif %}"
    reader = PromptReader("m", tiny_tokenizer(), template, RENDERER, 64)
    with pytest.raises(RequestError, match=r"it last read messages\[3\]\.x, role 'user'"):
        reader.read_chat([SYSTEM, MORE, user("y"), user("z")])


WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city"}}


def test_tools_are_described_if_the_template_ignores_them() -> None:
    reader = PromptReader("m", tiny_tokenizer(), CHATML, RENDERER, 512)
    own = reader.read_chat([SYSTEM, user("x")], tools=[WEATHER]).text or ""
    assert re.fullmatch(r'<system>S\n\n# Tools.*"weather".*</tool_call><user>x', own, re.DOTALL)
    alone = reader.read_chat([user("x")], tools=[WEATHER]).text or ""
    assert alone == own.replace("S\n\n", "")
    reader.describes_tools = False
    assert reader.read_chat([user("x")], tools=[WEATHER]).text == "<user>x"
    for known in ("{{ tools | tojson }}", DEFINED):
        reader = PromptReader("m", tiny_tokenizer(), CHATML + known, RENDERER, 512)
        assert "# Tools" not in (reader.read_chat([user("x")], tools=[WEATHER]).text or "")


@pytest.mark.parametrize("form", FORMS)
def test_message_forms(form: str) -> None:
    template, messages, expected = FORMS[form]
    text = RENDERER.render(template, normalise_messages(messages), named_tokens={}).text
    assert text == expected


WRONG: list[tuple[Any, str]] = [
    ({"content": "x"}, r"messages\[0\].role is missing; use system, user, assistant or tool"),
    ({"role": 5, "content": "x"}, r"messages\[0\].role must be text, not 5"),
    (user(5), r"messages\[0\].content must be text or a list of parts, not int"),
    (user({"text": "x"}), r"messages\[0\].content must be text or a list of parts, not an object"),
    (user([5]), r"messages\[0\].content\[0\] must be a part with a type, not int"),
    (
        user(["a", {"type": "image_url", "image_url": {"url": "x"}}]),
        r"messages\[0\].content\[1\] has type 'image_url', but this model reads only text; leave",
    ),
    (user([{"type": "text"}]), r"messages\[0\].content\[0\].text must be text, not None"),
    (user("x", tool_calls={}), r"messages\[0\].tool_calls must be a list, not {}"),
    (user("x", tool_calls=[{}]), r"messages\[0\].tool_calls\[0\] must have a function with a name"),
    (user("x", seen={1}), r"messages\[0\].seen must be JSON, and set is not a JSON type"),
]


@pytest.mark.parametrize(("message", "error"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_messages_name_the_field(message: Any, error: str) -> None:
    with pytest.raises(MessageError, match=f"^{error}"):
        normalise_messages([message])
    with pytest.raises(MessageError, match="^" + error.replace(r"messages\[0\]", "input")):
        normalise_messages([message], ["input"])


def test_messages_are_dictionaries_or_objects_with_fields() -> None:
    assert all(map(is_message, ({}, Turn("user", ""), Dumped())))
    assert not any(map(is_message, ("", [], Turn, Dumped, None)))


def test_plain_values() -> None:
    values = (np.float32(0.5), np.int64(3), Role.USER, {1: None})
    assert plain(values, "x") == [0.5, 3, "user", {"1": None}]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MessageError, match=r"^x is nested too deep"):
        plain(deep, "x")


NAMED = {
    "bos_token": "<s>",
    "pad_token": {"content": "<pad>"},
    "unk_token": None,
    "extra_special_tokens": {"image_token": "<img>"},
    "additional_special_tokens": ["<a>", {"content": "<b>"}],
    "add_bos_token": True,
}


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({}, "<s>|<pad>||<img>|<a><b>"),
        ({"unk_token": "<unk>", "pad_token": "<p>"}, "<s>|<p>|<unk>|<img>|<a><b>"),
    ],
)
def test_named_tokens_of_a_folder(tmp_path: Path, special: dict[str, Any], expected: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokens = named_tokens(tmp_path, tiny_tokenizer())
    assert RENDERER.render(TOKENS, [], named_tokens=tokens).text == expected


TOKENS = (
    "{{ bos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|"
    "{{ additional_special_tokens | join }}"
)


def tiny_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    return Tokenizer(backend, Vocabulary(byte_level=True), "tiny")


def test_named_tokens_of_a_gguf_file(write_gguf: Any) -> None:  # noqa: F811
    keys = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("padding", "unknown"))}
    checkpoint = open_checkpoint(write_gguf(keys | {"tokenizer.ggml.bos_token_id": None}))
    tokens = checkpoint.named_tokens(checkpoint.load_tokenizer())
    assert tokens == {
        "bos_token": "",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|im_start|>",
    }


@pytest.mark.parametrize("layout", ["config", "files", "json", "gguf"])
def test_named_templates(tmp_path: Path, write_gguf: Any, layout: str) -> None:  # noqa: F811
    named = {
        "default": "D",
        "tool_use": "T{{ tools | length }}",
        "rag": "R{{ documents | length }}",
    }
    if layout == "gguf":
        values = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
        values["tokenizer.chat_template"] = values.pop("tokenizer.chat_template.default")
        checkpoint = open_checkpoint(
            write_gguf(values | {"tokenizer.chat_templates": ["tool_use", "rag"]})
        )
        default, tool_use = checkpoint.chat_template, checkpoint.tool_template
        templates = dict(checkpoint.other_templates)
    else:
        write_templates(tmp_path, named, layout)
        templates = chat_templates(tmp_path)
        default, tool_use = templates.pop("default"), templates.pop("tool_use")
    reader = PromptReader("m", tiny_tokenizer(), default, RENDERER, 64, tool_use, templates)
    documents = [{"text": "x"}]
    assert text_of(reader) == "D"
    assert text_of(reader, tools=[{}]) == "T1"
    assert text_of(reader, chat_template="rag", documents=documents) == "R1"
    assert text_of(reader, tools=[{}], chat_template="default") == "D"
    assert text_of(reader, chat_template="{{ messages[0].content }}") == "aa"
    with pytest.raises(RequestError, match="'x' is unknown; m has default, tool_use, rag"):
        text_of(reader, chat_template="x")


def write_templates(folder: Path, named: dict[str, str], layout: str) -> None:
    listed = [{"name": name, "template": text} for name, text in named.items()]
    if layout == "config":
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    elif layout == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": listed}))
    else:
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        for name, text in named.items():
            if name != "default":
                (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)


def text_of(reader: PromptReader, **options: Any) -> str | None:
    return reader.read_chat([user("aa")], **options).text


@pytest.mark.parametrize("function", [{}, {"parameters": None}, {"parameters": {}}])
def test_functions_without_parameters(function: dict[str, Any]) -> None:
    template = "{% for t in tools %}{{ t.function.parameters.properties | tojson }}{% endfor %}"
    reader = PromptReader("m", tiny_tokenizer(), template, RENDERER, 64)
    tools = [{"type": "function", "function": {"name": "now", **function}}]
    assert text_of(reader, tools=tools) == "{}"
    assert tools == [{"type": "function", "function": {"name": "now", **function}}]


def test_only_named_templates() -> None:
    reader = PromptReader("m", tiny_tokenizer(), None, RENDERER, 64, None, {"rag": "R"})
    with pytest.raises(RequestError, match=r"^chat_template is missing; m has rag$"):
        text_of(reader)


REFUSED = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (
            "{% for m in messages %}{% if m.role == 'tool' %}"
            + REFUSED
            + "{% endif %}{% endfor %}",
            [user("x"), {"role": "tool", "content": "y"}, user("z")],
            "refuses these messages: roles must alternate (it last read messages[1].role, role "
            "'tool')",
        ),
        (
            "{% for m in messages %}{{ m['content'] + m.extra }}{% endfor %}",
            [user("x", extra="y"), user("z", extra=["y"])],
            'cannot render these messages: can only concatenate str (not "list") to str '
            "(it last read messages[1].extra, role 'user')",
        ),
        (
            "{% for m in messages[1:] %}{{ m.extra.more }}{% endfor %}",
            [user("x"), user("z")],
            "cannot render these messages: the field 'extra' is missing (it last read "
            "messages[1].extra, role 'user')",
        ),
        (
            "{% if messages[0].role == 'system' %}" + REFUSED + "{% endif %}",
            [{"role": "system", "content": "x"}, user("z")],
            "refuses these messages: roles must alternate (it last read messages[0].role, role "
            "'system'; if the model takes no system message, put its text before the first user's)",
        ),
        (
            "{{ tools.x.y }}",
            [user("x")],
            "cannot render these messages: 'None' has no attribute 'x'",
        ),
    ],
)
def test_errors_of_templates_name_the_field(template: str, messages: list[Any], error: str) -> None:
    reader = PromptReader("m", tiny_tokenizer(), template, RENDERER, 64)
    with pytest.raises(RequestError, match=re.escape(f"the chat template {error}")):
        reader.read_chat(messages)
    if "messages[" in error:
        places = [f"input[{i}]" for i in range(len(messages))]
        with pytest.raises(RequestError, match=r"it last read input\[[01]\]\."):
            reader.read_chat(messages, places=places)
