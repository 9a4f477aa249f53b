from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.templates import Renderer
from headrace.errors import FormatError, HeadraceError, RequestError

USER = [{"role": "user", "content": "Hi <b>"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"é": {"type": "number"}}},
        },
    }
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}{{ "
    "'<|im_start|>system\nDefault<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + eos_token }}
{%- endfor %}
{% generation %}{{ ns.count }}{% endgeneration %}
{{ "%02d" % ns.count }} {{ 'ab' * 3 }} {{ 2 ** 5 }} {{ messages[-1].content.split('+')[0] }}
"""


RENDERER = Renderer()
"""Shared by all tests, so that few processes start."""


def render(template: str, messages: Any = USER, **options: Any) -> str:
    options.setdefault("named_tokens", {"bos_token": "<s>", "eos_token": "</s>"})
    return RENDERER.render(template, messages, **options).text


@pytest.fixture(scope="module", autouse=True)
def renderer() -> Iterator[None]:
    """Make the renderer anew if a worker returns to this module after another one."""
    global RENDERER
    RENDERER = Renderer()
    yield
    RENDERER.close()


class TestRendering:
    @pytest.mark.parametrize("template", [CHATML, LLAMA3])
    @pytest.mark.parametrize("messages", [USER, CHAT])
    @pytest.mark.parametrize("tools", [None, TOOLS])
    @pytest.mark.parametrize("prompt", [True, False])
    def test_renders_as_transformers(
        self, template: str, messages: Any, tools: Any, prompt: bool
    ) -> None:
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        (expected,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=prompt, **names
        )
        assert render(template, messages, tools=tools, add_generation_prompt=prompt) == expected

    def test_the_default_model(self, smollm2: Path) -> None:
        checkpoint = open_checkpoint(smollm2)
        assert checkpoint.chat_template is not None
        tokenizer = checkpoint.load_tokenizer()
        text = render(checkpoint.chat_template, named_tokens=checkpoint.named_tokens(tokenizer))
        assert text.endswith("<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.encode(text, add_special=False, parse_special=True)[0] == 1

    def test_chat_template_kwargs(self) -> None:
        assert (
            render("{{ enable_thinking }}", chat_template_kwargs={"enable_thinking": False})
            == "False"
        )

    def test_the_date(self) -> None:
        assert render("{{ strftime_now('%Y') }}").isdigit()


class TestRefusedTemplates:
    def test_arguments_are_a_dictionary(self) -> None:
        with pytest.raises(
            RequestError, match="chat_template_kwargs must be a dictionary, not list"
        ):
            render("{{ mood }}", chat_template_kwargs=["mood"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tools": 5}, "tools must be a list of dictionaries, not 5"),
            ({"tools": ["a"]}, "tools must be a list of dictionaries"),
            (
                {"add_generation_prompt": "x"},
                "add_generation_prompt must be true or false, not 'x'",
            ),
        ],
    )
    def test_other_arguments_have_types(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            render("{{ tools }}", **options)

    @pytest.mark.parametrize("name", ["bos_token", "eos_token"])
    def test_chat_template_kwargs_may_not_replace_names(self, name: str) -> None:
        with pytest.raises(RequestError, match=name):
            render("{{ bos_token }}", chat_template_kwargs={name: "x"})

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ ().__class__ }}",
            "{{ ''|attr('__class__') }}",
            "{{ ''['__class__'] }}",
            "{{ '{0.__class__}'.format(messages) }}",
            "{{ '{0.__class__}'.format_map({'0': 1}) }}",
            "{{ ['{0.__class__}']|map('format', 1)|list }}{{ ''.__class__ }}",
            "{{ cycler.__init__.__globals__.os }}",
            "{{ joiner.__init__ }}",
            "{{ lipsum.__globals__ }}",
            "{{ lipsum() }}",
            "{{ namespace.__init__.__globals__ }}",
            "{{ self.__init__.__globals__ }}",
            "{{ raise_exception.__globals__ }}",
            "{{ strftime_now.__code__ }}",
            "{{ (messages|map(attribute='__class__')|list)[0] }}",
            "{{ messages.append(1) }}",
            "{% set x = messages[0].update({'role': 'system'}) %}",
            "{% include 'etc/passwd' %}",
            "{% import 'os' as os %}",
            "{{ 'a' * 10**9 }}",
            "{{ [0] * 10**9 }}",
            "{{ 10**9 * 'a' }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%*d' % (1000000000, 1) }}",
            "{{ 9 ** (9 ** 9) }}",
            "{% for i in range(10**9) %}{% endfor %}",
            "{{ range(10**30) }}",
            "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
            "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
            "{{ undefined.field }}",
            "{{ messages[0].content.field.field }}",
            "{{ 1 / 0 }}",
            "{{ none() }}",
        ],
    )
    def test_refused(self, template: str) -> None:
        with pytest.raises(HeadraceError):
            render(template)

    @pytest.mark.parametrize(
        "template",
        [
            "{% if %}",
            "{{ 'x' ",
            "{% endfor %}",
            "{{ x | nosuchfilter }}",
            "x" * (2 << 20),
            "{{ " + "(" * 5000,
        ],
    )
    def test_not_a_template(self, template: str) -> None:
        with pytest.raises(FormatError, match="chat template"):
            render(template)

    def test_the_message_of_the_template_reaches_the_caller(self) -> None:
        with pytest.raises(RequestError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")

    def test_messages_are_not_changed(self) -> None:
        messages = [{"role": "user", "content": "x"}]
        with pytest.raises(FormatError):
            render("{{ messages.clear() }}", messages)
        assert messages == [{"role": "user", "content": "x"}]

    def test_a_missing_field(self) -> None:
        with pytest.raises(RequestError, match="cannot render"):
            render(CHATML, [{"role": "user"}])
