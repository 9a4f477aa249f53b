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
import re
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
from typing import Any, BinaryIO, NoReturn, cast

import jinja2.debug  # noqa: F401
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from headrace.checkpoint.template_needs import TemplateNeeds
from headrace.checkpoint.template_sandbox import Sandbox, compile_template
from headrace.checkpoint.template_text import (
    CONTINUED,
    INSERTED,
    LITERAL,
    UNKNOWN,
    TracedText,
    concat,
    spans,
    traced_value,
)

_MAX_TEMPLATE = 1 << 20
_MAX_OUTPUT = 4 << 20
_MAX_MESSAGE = 1000
_HEAD = 4
"""Bytes of a frame's length, little endian."""
_ROLES = frozenset(
    "system developer user assistant tool function ipython observation environment model".split()
)
"""Roles that no user writes."""
_MISSING = re.compile(r"'dict object' has no attribute '(\w+)'")
_now = datetime.now()
"""The same time in all renderings of a request."""


class _Refusal(Exception):
    def __init__(self, blame: str, message: str) -> None:
        super().__init__(message[:_MAX_MESSAGE])
        self.blame = blame


def serve(seconds: int, memory: int) -> None:
    """Render until stdin ends, with `seconds` of CPU time per frame and `memory` bytes.

    `{"template": ...}` has no response. `{"names": ...}` gets the result of `render`, or
    `{"blame": "template" or "messages", "message": ...}`.
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
                _respond(render(template, request))
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


def _respond(response: dict[str, Any]) -> None:
    raw = json.dumps(response).encode()
    sys.stdout.buffer.write(len(raw).to_bytes(_HEAD, "little") + raw)
    sys.stdout.buffer.flush()


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    while head := stream.read(_HEAD):
        yield stream.read(int.from_bytes(head, "little"))


def render(template: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the text, and the origins of its characters if the request traces them.

    Raises _Refusal or MemoryError.
    """
    global _now
    _now = datetime.now()
    tokens, names = request["tokens"], request["names"]
    messages, places, notes = _needs(template, json.dumps(tokens)).adapt(
        names["messages"], request["places"], names.get("tools"), request["describes_tools"]
    )
    compiled = _compile(template)
    environment = cast(Sandbox, compiled.environment)
    environment.watch(messages)
    try:
        text = _generate(compiled, tokens | names | {"messages": messages})
    except _Refusal as refusal:
        if refusal.blame == "messages" and environment.last_read:
            number, field = environment.last_read
            place = f"{places[number]}.{field}"
            raise _at(refusal, place, messages[number].get("role")) from None
        raise
    finally:
        environment.watch(())
    if not request["traces"]:
        return {"text": text, "notes": notes}
    traced = _trace(template, tokens, names | {"messages": messages}, request["continues"])
    if traced != text:
        # The template has a value that is never the same twice.
        traced = TracedText(text)
    continued = spans(traced, CONTINUED)
    return {
        "text": text,
        "notes": notes,
        "inserted": spans(traced, INSERTED + CONTINUED),
        "unknown": spans(traced, UNKNOWN),
        "end": continued[-1][1] if continued else None,
    }


def _at(refusal: _Refusal, place: str, role: object) -> _Refusal:
    """Add the field that the template read last."""
    advice = ""
    if role == "system":
        advice = "; if the model takes no system message, put its text before the first user's"
    reason = _MISSING.sub(r"the field '\1' is missing", str(refusal))
    return _Refusal(
        refusal.blame, f"{reason} (it last read {place}, role {str(role)[:64]!r}{advice})"
    )


def _trace(
    template: str, tokens: dict[str, Any], names: dict[str, Any], continues: bool
) -> TracedText:
    values = traced_value(names)
    for message in values["messages"]:
        role = message.get("role")
        # Some templates make a control token of a role: '<|' + message.role + '|>'.
        if isinstance(role, str) and (
            role in _ROLES or f"'{role}'" in template or f'"{role}"' in template
        ):
            message["role"] = TracedText(role, LITERAL)
    if continues and values["messages"]:
        last = values["messages"][-1]
        if isinstance(last.get("content"), list) and last["content"]:
            part = last["content"][-1]
            part["text"] = TracedText(part["text"], CONTINUED)
        elif isinstance(last.get("content"), str):
            last["content"] = TracedText(last["content"], CONTINUED)
    try:
        compiled = _compile(template, True)
        return concat(compiled.generate(**(traced_value(tokens, LITERAL) | values)))
    except MemoryError:
        raise
    except Exception:
        return TracedText("")


@lru_cache(maxsize=1)
def _needs(template: str, tokens: str) -> TemplateNeeds:
    compiled, names = _compile(template), json.loads(tokens)
    return TemplateNeeds(
        template,
        lambda messages, tools: _generate(compiled, names | {"messages": messages, "tools": tools}),
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


@lru_cache(maxsize=2)
def _compile(template: str, is_traced: bool = False) -> Template:
    if len(template) > _MAX_TEMPLATE:
        raise _Refusal(
            "template",
            f"chat template of {len(template):,} characters, more than {_MAX_TEMPLATE:,}",
        )
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return compile_template(template, functions, is_traced)
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
    return _now.strftime(layout)
