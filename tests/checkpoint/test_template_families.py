"""Chat templates of many families, each with its own constructs, against transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.checkpoint.folder import chat_template
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.template_needs import TemplateNeeds
from headrace.checkpoint.templates import Renderer
from headrace.errors import FormatError, RequestError
from headrace.messages import normalise_messages
from headrace.prompts import PromptReader
from tests import chat_templates as conversations
from tests.chat_templates import DOCUMENTS, KINDS, TOOLS
from tests.checkpoint.test_tokenizer import TEXTS

CHATS = conversations.CHATS | {
    "texts": [{"role": "user", "content": text or "-"} for text in TEXTS[::2]]
}
DROP_CALLS = ("TURNS", "GROUNDED")
"""Templates that drop calls of tools, so that the calls become text."""
RENDERER = Renderer()


@pytest.fixture(scope="module", autouse=True)
def renderer() -> Iterator[None]:
    """Make the renderer anew if a worker returns to this module after another one."""
    global RENDERER
    RENDERER = Renderer()
    yield
    RENDERER.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", CHATS)
def test_templates_equal_transformers(kind: str, chat: str) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = normalise_messages(CHATS[chat])
    theirs = messages
    if chat == "parts" and kind != "TURNS":  # the other templates take text alone
        theirs = [{"role": "user", "content": " look \nhere "}]
    for tools in (None, TOOLS):
        for documents in (None, DOCUMENTS):
            for prompt, further in (
                (True, {}),
                (False, {"enable_thinking": False, "date_string": "26 Jul 2024"}),
            ):
                options: dict[str, Any] = {
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": prompt,
                }
                options |= names | further
                given = options | {"named_tokens": names, "chat_template_kwargs": further}
                for name in (*names, *further):
                    del given[name]
                if chat == "calls" and kind in DROP_CALLS:
                    theirs = in_known_roles(kind, messages, options)
                    assert "<tool_call>" in theirs[1]["content"]
                try:
                    expected = by_transformers(kind, theirs, options)
                except Exception as error:  # jinja2's, or by a template's own raise_exception
                    folded = in_known_roles(kind, messages, options)
                    if folded is None:
                        message = None if type(error) is TypeError else "template"
                        with pytest.raises(RequestError, match=message):
                            RENDERER.render(KINDS[kind], messages, **given)
                        continue
                    expected = by_transformers(kind, folded, options)
                assert RENDERER.render(KINDS[kind], messages, **given).text == expected


def by_transformers(kind: str, messages: Any, options: dict[str, Any]) -> Any:
    (text,), _ = render_jinja_template([messages], chat_template=KINDS[kind], **options)
    return text


def in_known_roles(kind: str, messages: Any, options: dict[str, Any]) -> Any:
    """The messages in the roles that a template takes; None if it takes these, or fails anyway."""

    def probe(probed: Any, tools: Any) -> str:
        text: str = by_transformers(kind, probed, options | {"tools": tools})
        return text

    adapted = TemplateNeeds(KINDS[kind], probe).adapt(messages, (), options["tools"])
    try:
        by_transformers(kind, adapted.messages, options)
    except Exception:
        return None
    return adapted.messages


def test_most_templates_render() -> None:
    """The test above compares texts, not only errors."""
    rendered = 0
    for template in KINDS.values():
        for chat in CHATS.values():
            try:
                rendered += bool(
                    RENDERER.render(
                        template,
                        normalise_messages(chat),
                        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
                    ).text
                )
            except RequestError:
                continue
    assert rendered >= 33


@pytest.mark.parametrize("layout", ["files", "one list"])
def test_the_named_template_for_tools(layout: str, tmp_path: Path) -> None:
    named = {
        "default": "D{{ messages[0].content }}",
        "tool_use": "T{{ tools | length }}{{ documents }}",
        "rag": "R",
    }
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=named)
    if layout == "files":
        theirs.save_pretrained(tmp_path)
    else:
        listed = [{"name": name, "template": template} for name, template in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    templates = chat_template(tmp_path), chat_template(tmp_path, "tool_use")
    assert (
        templates == (named["default"], named["tool_use"])
        and chat_template(tmp_path, "none") is None
    )
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
        assert read(*templates, tools=tools) == expected


def read(default: str | None, tool_use: str | None, **options: Any) -> str | None:
    class Plain:
        bos_token = eos_token = ""
        vocab_size, bos_id = 1, None

        def encode(self, text: str, **options: Any) -> list[int]:
            return [0]

        def token_bytes(self, token_id: int) -> bytes:
            return b"a" * 100

    reader = PromptReader("m", Plain(), default, RENDERER, 64, tool_use)  # type: ignore[arg-type]
    return reader.read_chat(CHATS["one"], sanitize_control_tokens=False, **options).text


def test_the_named_template_of_a_gguf_file(write_gguf: Any) -> None:
    checkpoint = open_checkpoint(
        write_gguf({"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"})
    )
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("D", "T")
    assert open_checkpoint(write_gguf({"tokenizer.chat_template": "D"})).tool_template is None


def test_a_link_that_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool_use.jinja").write_text("T")
    (tmp_path / "model" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError):
        chat_template(tmp_path / "model", "tool_use")
