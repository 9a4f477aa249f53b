"""The tools of a request, and which of them the model must call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import RequestError
from headrace.server.field_types import FUNCTION_NAME

NAME = re.compile(FUNCTION_NAME)
_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    """The JSON schema of its arguments, which are an object."""

    def parameter(self, key: str) -> Mapping[str, Any]:
        """The schema of one argument; empty where there is none for it."""
        properties = self.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def parameter_types(self, key: str) -> frozenset[str]:
        """The JSON types that one argument may have; empty where the schema names none."""
        schema = self.parameter(key)
        types = schema.get("type")
        if isinstance(types, str):
            return frozenset((types,))
        if isinstance(types, list):
            return frozenset(one for one in types if isinstance(one, str))
        values = schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return frozenset(("string",))
        return frozenset()


@dataclass(frozen=True)
class ToolChoice:
    """Which calls the answer is to have: `none`, `auto`, `required`, or `named`, which is a call of
    the tool `name`.
    """

    mode: str
    name: str | None = None


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a request in OpenAI's form. Raises RequestError, which names what is wrong."""
    result: dict[str, Tool] = {}
    for i, one in enumerate(tools or ()):
        function = one.get("function") if one.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise RequestError(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"tools[{i}].function.name must be 1 to 128 of A-Z, a-z, 0-9, _, . and -"
            )
        if name in result:
            raise RequestError(f"tools[{i}].function.name is that of another tool: {name}")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"tools[{i}].function.parameters must be a JSON schema")
        result[name] = Tool(name, parameters) if parameters else Tool(name)
    return tuple(result.values())


def read_tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """The `tool_choice` of a request; None is `auto` where there are tools. Raises RequestError,
    which names what is wrong.
    """
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(
                f"tool_choice must be one of {', '.join(_CHOICES)}, or name a function"
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice is required, and there are no tools")
        return ToolChoice(choice if tools else "none")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in {tool.name for tool in tools}:
        raise RequestError("tool_choice names a function that is not among the tools")
    return ToolChoice("named", str(name))
