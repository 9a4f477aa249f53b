"""Builds grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.server.output_parsers.tools import Tool

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""White space as `json.dumps` writes it. Small models may never end flexible white space."""

MAX_CALLS = 8
"""Max tool calls in a response that must call tools."""


class LarkGrammar:
    """A grammar under construction. Its methods return expressions."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = {text: token for text, token in control_tokens.items() if text}
        self._rules: list[str] = []
        longest_first = sorted(self._control_tokens, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def text(self, text: str) -> str:
        parts, position = [], 0
        for match in self._marker.finditer(text):
            parts.append(_quoted(text[position : match.start()]))
            parts.append(f"<[{self._control_tokens[match[0]]}]>")
            position = match.end()
        parts.append(_quoted(text[position:]))
        return " ".join(filter(None, parts)) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        own = schema.get("x-guidance")
        style = {**_JSON_STYLE, **(own if isinstance(own, Mapping) else {})}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': style})}")

    def up_to(self, marker: str) -> str:
        control = self._marker.search(marker)
        if control is None:
            return self.rule("/(?s:.*)/", f"[suffix={_quoted(marker)}]")
        # A terminal (in capitals) joins the text with the part of the marker before the token.
        text = f"TEXT{len(self._rules)}"
        self._rules.append(f"{text}: /(?s:.*)/ {_quoted(marker[: control.start()])}")
        return f"{text} {self.text(marker[control.start() :])}"

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def either(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def repeated(self, expression: str, separator: str, parallel: bool) -> str:
        """Match the expression once, or up to `MAX_CALLS` times.

        Without the bound, a small model repeats one call until its tokens are used up.
        """
        if not parallel:
            return expression
        return f"{expression} ({self.text(separator)} {expression}){{0,{MAX_CALLS - 1}}}"

    def arguments(
        self, tool: Tool, argument: Callable[[str, Mapping[str, Any]], str], separator: str
    ) -> str:
        """Match a tool's arguments in the order of its schema; optional ones may be absent."""
        listed = tool.parameters.get("required")
        required = listed if isinstance(listed, list) else ()
        # From the last argument to the first: `first` matches the arguments from this one on if no
        # other precedes them, `more` matches them after another argument.
        first, more = '""', '""'
        for key, schema in reversed(properties(tool)):
            expression = argument(key, schema)
            skip_more, skip_first = ("", "") if key in required else (f" | {more}", f" | {first}")
            next_more = self.rule(f"{self.text(separator)} {expression} {more}{skip_more}")
            first = self.rule(f"{expression} {more}{skip_first}")
            more = next_more
        return first

    def render(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules)) + "\n"


def properties(tool: Tool) -> list[tuple[str, Mapping[str, Any]]]:
    shared = {
        name: tool.parameters[name]
        for name in ("$defs", "definitions", "x-guidance")
        if name in tool.parameters
    }
    keys = tool.parameters.get("properties")
    if not isinstance(keys, Mapping):
        return []
    return [(key, {**shared, **tool.parameter(key)}) for key in keys]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
