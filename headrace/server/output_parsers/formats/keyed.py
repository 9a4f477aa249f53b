"""Arguments as keys and raw texts between tags."""

import json
from collections.abc import Mapping
from typing import Any

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.tools import Tool

_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class KeyedArguments:
    """Writes one call's arguments as JSON."""

    def __init__(self, reader: OutputReader, name: str) -> None:
        reader.start_call(name)
        reader.arguments("{")
        self._reader = reader
        self._tool = reader.tools.get(name, Tool(name))
        self._separator = ""
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []

    def key(self, key: str) -> None:
        self._types = self._tool.parameter_types(key)
        self._reader.arguments(f"{self._separator}{_json(key)}: " + ('"' if self._is_text else ""))
        self._separator = ", "
        self._value.clear()

    def text(self, text: str) -> None:
        if self._is_text:
            self._reader.arguments(_json(text)[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        self._reader.arguments(
            '"' if self._is_text else _as_json("".join(self._value), self._types)
        )

    def cut(self) -> None:
        if not self._is_text:
            self._reader.arguments("".join(self._value))

    def end(self) -> None:
        self._reader.arguments("}")

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}


def value_grammar(
    lark: LarkGrammar, tool: Tool, key: str, schema: Mapping[str, Any], closer: str
) -> str:
    """Match a value and its closing tag. Only `enum` and `const` restrict unquoted strings."""
    texts = schema.get("enum", [schema.get("const")])
    if tool.parameter_types(key) != {"string"}:
        return f"{lark.json(schema)} {lark.text(closer)}"
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return lark.either(lark.text(text + closer) for text in texts)
    return lark.up_to(closer)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, types: frozenset[str]) -> str:
    value = text.strip()
    value = _PYTHON_LITERALS.get(value, value)
    kind = _kind(value)
    allowed = types | ({"integer"} if "number" in types else set())
    return value if kind is not None and (not types or kind in allowed) else _json(text)


def _kind(text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {
        bool: "boolean",
        int: "integer",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return kinds[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(constant)
