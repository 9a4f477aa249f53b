import re
from collections.abc import Collection, Mapping, Sequence
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
    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    strict: bool | None = None
    """Whether a schema that cannot be enforced completely is an error; None: the server's choice.
    """
    field: str = "tools[0]"
    """Field of the request, for errors."""

    def parameter(self, key: str) -> Mapping[str, Any]:
        properties = self.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def parameter_types(self, key: str) -> frozenset[str]:
        """Return the JSON types of an argument; empty if the schema does not say."""
        schema = self.parameter(key)
        types = schema.get("type")
        if isinstance(types, str):
            return frozenset((types,))
        if isinstance(types, list):
            return frozenset(item for item in types if isinstance(item, str))
        values = schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return frozenset(("string",))
        return frozenset()


@dataclass(frozen=True)
class ToolChoice:
    mode: str
    """`none`, `auto`, `required`, or `named` if it must call the tool `name`."""
    name: str | None = None
    allowed: frozenset[str] | None = None
    """Names of the only tools that the model may call; None: all of the request."""

    def demanded(self, tools: "Sequence[Tool]") -> list[str]:
        """The names of the tools of which the output must call one; empty if it need not."""
        if self.mode == "named":
            return [tool.name for tool in tools if tool.name == self.name]
        return [tool.name for tool in tools] if self.mode == "required" else []


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Parse tools of chat completions. Raises RequestError, which names the field."""
    by_name: dict[str, Tool] = {}
    for i, item in enumerate(tools or ()):
        function = item.get("function") if item.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise RequestError(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"tools[{i}].function.name must have 1 to 128 characters of A-Z, a-z, 0-9, _, . "
                "and -"
            )
        if name in by_name:
            raise RequestError(f"tools[{i}].function.name {name!r} is already used by another tool")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"tools[{i}].function.parameters must be a JSON schema")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise RequestError(f"tools[{i}].function.strict must be true or false")
        by_name[name] = Tool(
            name=name,
            parameters=parameters or _NO_PARAMETERS,
            strict=strict,
            field=f"tools[{i}]",
        )
    return tuple(by_name.values())


def read_tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """Parse `tool_choice`. Raises RequestError."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(f"tool_choice must be {', '.join(_CHOICES)} or name a function")
        if choice == "required" and not tools:
            raise RequestError("tool_choice is required, but the request has no tools")
        return ToolChoice(choice if tools else "none")
    names = {tool.name for tool in tools}
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, names)
    name = _function_name(choice)
    if name not in names:
        raise RequestError("tool_choice names a function that is not among the tools")
    return ToolChoice("named", name)


def _allowed_tools(choice: Mapping[str, Any], names: Collection[str]) -> ToolChoice:
    """Parse OpenAI's choice of several tools."""
    inner = choice.get("allowed_tools")
    mode, listed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (0, 0)
    if mode not in ("auto", "required") or not isinstance(listed, Sequence):
        raise RequestError(
            "tool_choice of type allowed_tools must have the mode auto or required, and tools"
        )
    chosen = [_function_name(item) if isinstance(item, Mapping) else None for item in listed]
    for i, name in enumerate(chosen):
        if name not in names:
            raise RequestError(f"tool_choice: allowed tool {i} is not among the tools")
    if mode == "required" and not chosen:
        raise RequestError("tool_choice is required, but allows no tools")
    return ToolChoice(mode if chosen else "none", None, frozenset(filter(None, chosen)))


def _function_name(choice: Mapping[str, Any]) -> str | None:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
