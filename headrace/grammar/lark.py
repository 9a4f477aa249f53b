"""Builds grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANY_TEXT = "/(?s:.*)/"

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""White space as `json.dumps` writes it. Small models may never end flexible white space."""


class Lark:
    """A grammar under construction. Its methods return expressions."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = {text: token for text, token in control_tokens.items() if text}
        self._rules: list[str] = []
        longest_first = sorted(self._control_tokens, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def has_control_token(self, text: str) -> bool:
        return self._marker.search(text) is not None

    def text(self, text: str) -> str:
        parts, position = [], 0
        for match in self._marker.finditer(text):
            parts.append(quoted(text[position : match.start()]))
            parts.append(f"<[{self._control_tokens[match[0]]}]>")
            position = match.end()
        parts.append(quoted(text[position:]))
        return " ".join(filter(None, parts)) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        own = schema.get("x-guidance")
        style = {**_JSON_STYLE, **(own if isinstance(own, Mapping) else {})}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': style})}")

    def up_to(self, marker: str) -> str:
        """Match text up to a marker and the marker; any text if the marker is empty."""
        if not marker:
            return self.rule(ANY_TEXT)
        control = self._marker.search(marker)
        if control is None:
            return self.rule(ANY_TEXT, f"[suffix={quoted(marker)}]")
        # A terminal joins the text with the part of the marker before the token.
        text = self.terminal(f"{ANY_TEXT} {quoted(marker[: control.start()])}")
        return f"{text} {self.text(marker[control.start() :])}"

    def rule(self, body: str, options: str = "") -> str:
        return self._add(f"r{len(self._rules)}", body, options)

    def terminal(self, body: str) -> str:
        """Add a rule of the lexer, whose name is in capitals."""
        return self._add(f"TEXT{len(self._rules)}", body)

    def either(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def render(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def _add(self, name: str, body: str, options: str = "") -> str:
        self._rules.append(f"{name}{options}: {body}")
        return name


def quoted(text: str) -> str:
    """Return a text as a literal; the empty text needs none."""
    return json.dumps(text, ensure_ascii=False) if text else ""
