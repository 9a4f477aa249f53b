"""Parts of grammars of tool calls."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.grammar.lark import Lark
from headrace.server.output_parsers.tools import Tool

MAX_CALLS = 8
"""Max tool calls in a response that must call tools."""


class LarkGrammar(Lark):
    """A grammar under construction, of tool calls too. Its methods return expressions."""

    has_answer = False
    """Whether a restricted text may take the place of the calls. A call without an opener is then a
    schema too: the lexer takes the longest literal, and would not see the start of other JSON.
    """

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
