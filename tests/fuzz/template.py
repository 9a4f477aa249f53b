"""Chat templates and conversations, rendered and tokenised as for generation."""

import json
import random
import re
from functools import cache
from typing import Any

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.templates import Renderer
from headrace.prompts import PromptReader
from tests.chat_templates import CHATS, KINDS
from tests.checkpoint.test_templates import CHAT, CHATML, LLAMA3, TOOLS
from tests.fuzz.files import scratch, tiny_gguf
from tests.fuzz.mutate import mutate_bytes, mutate_json

_PIECES = r"""
    {{ messages|map(attribute='content')|join('<|im_end|>') }}
    {{ messages[-1].content|replace('_', '')|indent(2)|title }}
    {{ ('%s<|im_end|>' % messages[0].content).split('|')|join }}
    {{ (messages[0].content ~ '<|im_start|>')[::-1][1:-1]|trim('<') }}
    {% set x %}<|im_end|>{{ messages[0].content }}{% endset %}{{ x.partition('|') }}{{ x * 2 }}
    {% for c in messages[0].content %}{{ c }}{% endfor %}
    {{ '{}<|im_end|>'.format(messages[0].content)|e|lower|center(99) }}
    {{ messages }}
    {{ messages[0].content * 99 }}
    {{ 'a'|center(10**9) }}
    {{ '%9999999d'|format(1) }}
    {{ ''.__class__ }}
    {{ x.y.z }}
    {% for i in range(999) %}{{ i }}{% endfor %}
    {% for m in messages recursive %}{{ loop(messages) }}{% endfor %}
    {% set x = messages %}
    {% raw %}
    {% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}
    {% if messages %}a{% else %}b{% endif %}
    {{ raise_exception('no') }}
    {{ tools|tojson(9) }}
    {{ strftime_now('%c' * 99) }}
    {{ messages|map(attribute='content')|join }}
    {{ namespace(a=1).a }}
    {%- break %}
    {{ range(10**9) }}
    {{ [1, 2][9] }}
    {{ '{0.x}'.format(1) }}
    {{ messages|sum(attribute='content') }}
    {{ 2 ** 99999 }}
    {{ messages|batch(10**6)|list }}
    {{ '\ud800' }}
    {{ '\N{BULLET}' }}
    {{ 'a'|indent(10**7) }}
    {{ messages|pprint }}
    {{ 'abc'|replace('', 'x' * 9999) }}
    {% generation %}{{ messages|length }}{% endgeneration %}
    {{ self }}
    {{ caller() }}
""".split("\n")

_CONTENTS = ("<|im_end|>", "<|im_start|>system", "<|im_", "start|>", "<|ENDOFTEXT|>", "</think>")
_OPTIONS = ("tools", "documents", "add_generation_prompt", "chat_template_kwargs")


@cache
def reader_parts() -> tuple[Any, Renderer]:
    path = scratch() / "tiny.gguf"
    path.write_bytes(tiny_gguf("Q8_0", False))
    return open_checkpoint(path).load_tokenizer(), Renderer()


def case(rng: random.Random) -> bytes:
    template = rng.choice([CHATML, LLAMA3, *KINDS.values()])
    for _ in range(rng.randint(1, 3)):
        starts = [0, len(template), *(match.start() for match in re.finditer("{[{%]", template))]
        at = rng.choice(starts) if rng.random() < 0.9 else rng.randrange(len(template))
        template = (
            template[:at]
            + rng.choice(_PIECES)
            + template[at + (rng.randrange(60) if rng.random() < 0.1 else 0) :]
        )
    if rng.random() < 0.2:
        template = mutate_bytes(rng, template.encode()).decode(errors="replace")
    options = {
        "tools": TOOLS,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    messages = [dict(message) for message in rng.choice([CHAT, *CHATS.values()])]
    if rng.random() < 0.5:
        message = rng.choice(messages)
        if isinstance(message["content"], str):
            message["content"] += rng.choice(_CONTENTS)
    conversation = {"messages": messages, "options": options if rng.random() < 0.5 else {}}
    changed = (
        mutate_json(rng, conversation) if rng.random() < 0.3 else json.dumps(conversation).encode()
    )
    return json.dumps(template).encode() + b"\n" + changed


def run(case: bytes) -> None:
    template, _, rest = case.partition(b"\n")
    try:
        given = json.loads(rest)
        messages, options = given["messages"], dict(given["options"])
    except (ValueError, TypeError, KeyError, RecursionError):  # no call that a user can write
        messages, options = CHAT, {}
    known = {name: options[name] for name in _OPTIONS if name in options}
    tokenizer, renderer = reader_parts()
    source = json.loads(template)
    reader = PromptReader("fuzz", tokenizer, source, renderer, 4096)
    prompt = reader.read_chat(messages, **known)
    plain = reader.read_chat(messages, **known, sanitize_control_tokens=False)
    if "strftime_now" in source or "random" in source:
        return
    assert prompt.text == plain.text
    if "<|" not in rest.decode(errors="replace"):
        assert prompt == plain
