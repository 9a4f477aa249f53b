"""The process that renders chat templates, which are untrusted jinja2 programs.

A sandbox bounds neither time nor memory, and may have holes. So the process limits both, and
cannot write files or start processes.
"""

import codecs
import errno
import json
import math
import os
import pprint  # noqa: F401 - jinja2 imports these four on demand, when no file can be opened
import resource
import sys
import textwrap  # noqa: F401
import time
import unicodedata  # noqa: F401
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from html import unescape  # noqa: F401
from typing import Any, BinaryIO, NoReturn

import jinja2.debug  # noqa: F401
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.checkpoint.template_needs import TemplateNeeds

_MAX_TEMPLATE = 1 << 20
_MAX_OUTPUT = 4 << 20
_MAX_MESSAGE = 1000
_HEAD = 4
"""Bytes of a frame's length, little endian."""


class _Refusal(Exception):
    def __init__(self, blame: str, message: str) -> None:
        super().__init__(message[:_MAX_MESSAGE])
        self.blame = blame


def serve(seconds: int, memory: int) -> None:
    """Render until stdin ends, with `seconds` of CPU time per frame and `memory` bytes.

    `{"template": ...}` has no response. `{"names": ...}` gets `{"text": ...}`, or `{"blame":
    "template" or "messages", "message": ...}`.
    """
    # Load the time zone and the codec of string literals while files can be opened.
    time.localtime()
    codecs.lookup("unicode_escape")
    for limit in (
        resource.RLIMIT_CORE,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    ):
        resource.setrlimit(limit, (0, 0))
    _limit(resource.RLIMIT_AS, memory)
    template = ""
    for frame in _frames(sys.stdin.buffer):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
        try:
            request = json.loads(frame)
            if "names" in request:
                _respond({"text": render(template, request["tokens"], request["names"])})
            else:
                template = request["template"]
                # Rendering reports the error again.
                with suppress(_Refusal):
                    _compile(template)
        except _Refusal as refusal:
            _respond({"blame": refusal.blame, "message": str(refusal)})
        except RecursionError:
            _respond({"blame": "messages", "message": "these messages are nested too deep"})
        except MemoryError:
            os._exit(errno.ENOMEM)


def _limit(limit: int, value: int) -> None:
    maximum = resource.getrlimit(limit)[1]
    if maximum != resource.RLIM_INFINITY:
        value = min(value, maximum)
    resource.setrlimit(limit, (value, maximum))


def _respond(response: dict[str, str]) -> None:
    raw = json.dumps(response).encode()
    sys.stdout.buffer.write(len(raw).to_bytes(_HEAD, "little") + raw)
    sys.stdout.buffer.flush()


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    while head := stream.read(_HEAD):
        yield stream.read(int.from_bytes(head, "little"))


def render(template: str, tokens: dict[str, Any], names: dict[str, Any]) -> str:
    """Raises _Refusal or MemoryError."""
    needs = _needs(template, json.dumps(tokens))
    messages = needs.adapt(names["messages"])
    return _generate(_compile(template), tokens | names | {"messages": messages})


@lru_cache(maxsize=1)
def _needs(template: str, tokens: str) -> TemplateNeeds:
    compiled, names = _compile(template), json.loads(tokens)
    return TemplateNeeds(
        template, lambda messages: _generate(compiled, names | {"messages": messages})
    )


def _generate(compiled: Template, names: dict[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**names):
            size += len(part)
            if size > _MAX_OUTPUT:
                raise _Refusal(
                    "messages",
                    f"the chat template's output is longer than {_MAX_OUTPUT:,} characters; "
                    "shorten the conversation",
                )
            parts.append(part)
    except (_Refusal, MemoryError):
        raise
    except SecurityError as error:
        raise _Refusal("template", f"chat template: {error}") from error
    except Exception as error:
        # A template can raise any Python error: a missing field, a wrong type, a call of None.
        raise _Refusal(
            "messages", f"the chat template cannot render these messages: {error}"
        ) from error
    return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Access to hidden attributes is an error, not an empty string."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}` marks text for training; its body has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=1)
def _compile(template: str) -> Template:
    if len(template) > _MAX_TEMPLATE:
        raise _Refusal(
            "template",
            f"chat template of {len(template):,} characters, more than {_MAX_TEMPLATE:,}",
        )
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    # Chat templates do not expect jinja2's other globals.
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise _Refusal(
            "template", f"chat template, line {error.lineno}: {error.message}"
        ) from error
    except (
        TemplateError,
        RecursionError,
        ValueError,
        OverflowError,
        SyntaxError,
        MemoryError,
    ) as error:
        # Deep nesting can raise MemoryError too.
        raise _Refusal(
            "template", f"chat template: {str(error) or 'it is nested too deep'}"
        ) from error


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal("messages", f"the chat template refuses these messages: {message}")


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
