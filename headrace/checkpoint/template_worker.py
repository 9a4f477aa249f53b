"""The process in which chat templates run: jinja2 programs that come with a model and are trusted
with nothing.

`templates.py` starts it and speaks with it, in frames of JSON behind their length. A template runs
in jinja2's immutable sandbox, with what transformers gives it (trimmed blocks, `tojson`,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks). No sandbox bounds time and
memory, and none has been without holes, so the process has limits of its own: on both, and it can
open no file, write to none and start no process. Whatever breaks them ends it, and the next
conversation gets another one.
"""

import codecs
import errno
import json
import math
import os
import pprint  # noqa: F401 - jinja2 imports these four when a template asks for them, and then no file can be opened
import resource
import sys
import textwrap  # noqa: F401
import time
import unicodedata  # noqa: F401
from collections.abc import Iterator
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

_MAX_TEMPLATE = 1 << 20
_MAX_OUTPUT = 4 << 20
_MAX_MESSAGE = 1000
_HEAD = 4
"""Bytes before each frame: its length, little endian."""


class _Refusal(Exception):
    """What is the matter, and whether the template is to blame or the messages."""

    def __init__(self, blame: str, message: str) -> None:
        super().__init__(message[:_MAX_MESSAGE])
        self.blame = blame


def serve(seconds: int, memory: int) -> None:
    """Compile and render until stdin ends. Each frame may use the processor for `seconds`, the
    process `memory` bytes of addresses.

    A frame `{"template": ...}` says what is rendered from now on, and has no answer. A frame
    `{"names": ...}` is answered by `{"text": ...}`, or by `{"blame": "template" or "messages",
    "message": ...}`. Without memory the process ends with ENOMEM.
    """
    # reads the time zone while files can be opened, and the next the codec of string literals
    time.localtime()
    codecs.lookup("unicode_escape")
    for what in (
        resource.RLIMIT_CORE,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    ):
        resource.setrlimit(what, (0, 0))
    _limit(resource.RLIMIT_AS, memory)
    template = ""
    for frame in _frames(sys.stdin.buffer):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
        try:
            request = json.loads(frame)
            if "names" in request:
                _answer({"text": render(template, request["names"])})
            else:
                template = request["template"]
                with suppress(_Refusal):  # which is said when there is something to render
                    _compile(template)
        except _Refusal as refusal:
            _answer({"blame": refusal.blame, "message": str(refusal)})
        except RecursionError:
            _answer({"blame": "messages", "message": "these messages are nested too deep"})
        except MemoryError:
            os._exit(errno.ENOMEM)


def _limit(what: int, value: int) -> None:
    """Set a limit for this process, and leave the highest that it may set as it is."""
    highest = resource.getrlimit(what)[1]
    resource.setrlimit(
        what, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest)
    )


def _answer(answer: dict[str, str]) -> None:
    raw = json.dumps(answer).encode()
    sys.stdout.buffer.write(len(raw).to_bytes(_HEAD, "little") + raw)
    sys.stdout.buffer.flush()


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    while head := stream.read(_HEAD):
        yield stream.read(int.from_bytes(head, "little"))


def render(template: str, names: dict[str, Any]) -> str:
    """The text of a template with these names. Raises _Refusal, or MemoryError."""
    compiled = _compile(template)
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**names):
            size += len(part)
            if size > _MAX_OUTPUT:
                raise _Refusal(
                    "messages",
                    f"the chat template's output is longer than {_MAX_OUTPUT:,} characters",
                )
            parts.append(part)
    except (_Refusal, MemoryError):
        raise
    except SecurityError as error:
        raise _Refusal("template", f"chat template: {error}") from error
    # a template can raise whatever Python can: a missing field, a wrong type, a call of None
    except Exception as error:
        raise _Refusal(
            "messages", f"the chat template cannot render these messages: {error}"
        ) from error
    return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The one environment that templates run in."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Reaching for what the sandbox hides is an error at once, not an empty string."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here its body as it
    stands.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    for name in ("lipsum", "cycler", "joiner"):  # not part of what chat templates may expect
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
    ) as error:  # the last for deep nesting, too
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
    """JSON as it is: jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
