"""Grammars in the Lark dialect that llguidance reads."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.server.output_parsers.tools import Tool

_WRITTEN = {
    "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
}


class LarkGrammar:
    """A grammar as it is built: expressions are texts, and rules get names."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        """`control_tokens`: token ids by their texts; such a text is written as its token."""
        self._control_tokens = {text: token for text, token in control_tokens.items() if text}
        self._rules: list[str] = []
        self._marker = re.compile(
            "|".join(map(re.escape, sorted(self._control_tokens, key=len, reverse=True))) or "(?!)"
        )

    def text(self, text: str) -> str:
        """Exactly this text."""
        result, at = [], 0
        for match in self._marker.finditer(text):
            result += [_quoted(text[at : match.start()]), f"<[{self._control_tokens[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in (*result, _quoted(text[at:])) if part) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value of this schema, written as `json.dumps` does: free white space need not end
        in a small model.
        """
        return self.rule(f"%json {json.dumps(_WRITTEN | dict(schema))}")

    def up_to(self, marker: str) -> str:
        """Any text that ends with `marker`, which is nowhere else in it."""
        control = self._marker.search(marker)
        if control is None:
            return self.rule("/(?s:.*)/", f"[suffix={_quoted(marker)}]")
        # in capitals, it is one expression with what must stand before the token
        text = f"TEXT{len(self._rules)}"
        self._rules.append(f"{text}: /(?s:.*)/ {_quoted(marker[: control.start()])}")
        return f"{text} {self.text(marker[control.start() :])}"

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def either(self, expressions: Iterable[str]) -> str:
        """One of some expressions."""
        return self.rule(" | ".join(expressions))

    def repeated(self, expression: str, separator: str, parallel: bool) -> str:
        """The expression once, or as often as you like with `separator` between."""
        return f"{expression} ({self.text(separator)} {expression})*" if parallel else expression

    def arguments(
        self, tool: Tool, written: Callable[[str, Mapping[str, Any]], str], separator: str
    ) -> str:
        """The arguments of a tool in the order of its schema, each as `written` makes it of key and
        schema.

        Those that are not required may be left out.
        """
        listed = tool.parameters.get("required")
        required = listed if isinstance(listed, list) else ()
        first, more = '""', '""'
        for key, schema in reversed(properties(tool)):
            one = written(key, schema)
            after = self.rule(
                f"{self.text(separator)} {one} {more}" + ("" if key in required else f" | {more}")
            )
            first = self.rule(f"{one} {more}" + ("" if key in required else f" | {first}"))
            more = after
        return first

    def render(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join((f"start: {start}", *self._rules)) + "\n"


def properties(tool: Tool) -> list[tuple[str, Mapping[str, Any]]]:
    """The arguments of a tool, each with a schema that stands on its own."""
    shared = {
        name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters
    }
    found = tool.parameters.get("properties")
    return (
        [(key, {**shared, **tool.parameter(key)}) for key in found]
        if isinstance(found, Mapping)
        else []
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
