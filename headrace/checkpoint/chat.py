"""Chat templates: jinja2 programs that come with a model and are trusted with nothing.

They run in jinja2's immutable sandbox with what transformers gives them (trimmed blocks, `tojson`, `raise_exception`,
`strftime_now`, loop controls, `generation` blocks) and with bounds on ranges, on repetition and on the output. No sandbox
bounds time or memory altogether: a server that renders the templates of others must do that from outside the process.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import FormatError, RequestError

_MAX_TEMPLATE = 1 << 20
_MAX_OUTPUT = 4 << 20
_MAX_RANGE = 100_000
_WIDE_FORMAT = re.compile(r"\d{5}|\*")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str,
    eos: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation; encode it with `parse_special` and without `add_special`.

    `chat_template_kwargs` are further names for the template, such as `enable_thinking`. Raises FormatError for a template that is
    not valid or does what it must not, RequestError for messages the template cannot render and for output over 4 MB.
    """
    further = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(further, Mapping):
        raise RequestError(f"chat_template_kwargs must be a dictionary, not {type(further).__name__}")
    names = {"messages": messages, "tools": tools, "bos_token": bos, "eos_token": eos, "add_generation_prompt": add_generation_prompt}
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(f"tools must be a list of dictionaries, not {reprlib.repr(tools)}")
    if not isinstance(add_generation_prompt, bool):
        raise RequestError(f"add_generation_prompt must be true or false, not {reprlib.repr(add_generation_prompt)}")
    if taken := sorted(names.keys() & further.keys()):
        raise RequestError(f"chat_template_kwargs may not replace {', '.join(taken)}")
    compiled = _compile(template)
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**names, **further):
            size += len(part)
            if size > _MAX_OUTPUT:
                raise RequestError(f"the chat template's output is longer than {_MAX_OUTPUT:,} characters")
            parts.append(part)
    except RequestError:
        raise
    except SecurityError as error:
        raise FormatError(f"chat template: {error}") from error
    except Exception as error:  # a template can raise whatever Python can: a missing field, a wrong type, a call of None
        raise RequestError(f"the chat template cannot render these messages: {error}") from error
    return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The one environment that templates run in."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that make much out of little, held to small results."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "*" and not numbers and math.prod(v if isinstance(v, int) else len(v) for v in (left, right)) > _MAX_OUTPUT:
            raise SecurityError("a repetition is too long")
        if operator == "**" and not (numbers and abs(left) <= 1 << 32 and abs(right) <= 64):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format is too wide")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Reaching for what the sandbox hides is an error at once, not an empty string."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here its body as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    if len(template) > _MAX_TEMPLATE:
        raise FormatError(f"chat template of {len(template):,} characters, more than {_MAX_TEMPLATE:,}")
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
    for name in ("lipsum", "cycler", "joiner"):  # not part of what chat templates may expect
        del environment.globals[name]
    environment.globals.update(range=_range, raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise FormatError(f"chat template, line {error.lineno}: {error.message}") from error
    except (TemplateError, RecursionError, ValueError, OverflowError, SyntaxError, MemoryError) as error:
        raise FormatError(f"chat template: {error}") from error


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _MAX_RANGE:
        raise SecurityError(f"a range of more than {_MAX_RANGE:,} numbers")
    return numbers


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON as it is: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
