"""Reads the tools and items of a Responses request as tools and messages of a chat.

Functions, custom tools and namespaces of both are served. Tools that OpenAI runs on its own
servers are left out, with a note in the log. So are items that no model of ours has written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.messages import note_mended, text_of_part
from headrace.server.errors import invalid
from headrace.server.lark_regex import lark_to_regex
from headrace.server.openai_records import ContentPart
from headrace.server.output_parsers.tools import NAME
from headrace.server.responses_records import InputItem

_FUNCTION_FIELDS = ("description", "parameters", "strict")
_INPUT = "input"
"""The one argument of the function that stands for a custom tool."""
_ACTIONS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Name of the function, and the field with its arguments, of calls of tools without a name."""
_RESULTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
)


@dataclass(frozen=True)
class ResponseTool:
    """A function or custom tool, and the names of its call in a response."""

    name: str
    namespace: str | None
    is_custom: bool
    chat_tool: dict[str, Any]
    """The tool in the form of chat completions, with the name that the model reads."""
    unbound: str = ""
    """Why the grammar of a custom tool cannot bind its input; empty if it can."""


def read_response_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, ResponseTool]:
    """Return the tools by the name that the model reads. Raises ApiError."""
    found: dict[str, ResponseTool] = {}
    for i, tool in enumerate(tools or ()):
        _add_tool(found, tool, f"tools[{i}]", None)
    return found


def _add_tool(
    found: dict[str, ResponseTool], tool: Mapping[str, Any], field: str, namespace: str | None
) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
            raise invalid(f"{field}.tools must be a list of tools", "tools")
        for i, item in enumerate(inner):
            _add_tool(found, item, f"{field}.tools[{i}]", str(tool.get("name") or ""))
        return
    if kind not in ("function", "custom"):
        if not isinstance(kind, str):
            raise invalid(f"{field}.type must be text, such as function", "tools")
        note_mended(f"{field} has type {kind[:64]!r}, which runs at OpenAI, and is left out")
        return
    name = tool.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{field}.name must have 1 to 128 characters of A-Z, a-z, 0-9, _, . and -", "tools"
        )
    full_name = _full_name(name, namespace)
    if full_name in found:
        raise invalid(f"{field}.name {full_name!r} is already used by another tool", "tools")
    unbound = ""
    if kind == "custom":
        function, unbound = _custom_function(tool, field)
    else:
        function = _plain_function(tool)
    chat_tool = {"type": "function", "function": {"name": full_name} | function}
    found[full_name] = ResponseTool(
        name=name,
        namespace=namespace or None,
        is_custom=kind == "custom",
        chat_tool=chat_tool,
        unbound=unbound,
    )


def _full_name(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _plain_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in _FUNCTION_FIELDS if name in tool}


def check_demanded(tools: Mapping[str, ResponseTool], choice: object) -> None:
    """Raise ApiError if a call that the request demands cannot have the grammar of its tool."""
    names = set(tools) if choice == "required" else set()
    if isinstance(choice, Mapping):
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, Mapping):
            names = {choice["function"]["name"]}
        elif allowed["mode"] == "required":
            names = {item["function"]["name"] for item in allowed["tools"]}
    for name, tool in tools.items():
        if name in names and tool.unbound:
            raise invalid(
                f"{tool.unbound}; change the grammar, or set tool_choice to auto, where no grammar "
                "binds a call",
                "tools",
            )


def _custom_function(tool: Mapping[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """Stand for a custom tool, whose input is text, by a function with one argument.

    Returns the function, and why the tool's grammar cannot bind the argument.
    """
    unbound = ""
    description = str(tool.get("description") or "")
    text_format = tool.get("format")
    text: dict[str, Any] = {"type": "string"}
    if isinstance(text_format, Mapping) and text_format.get("type") == "grammar":
        syntax, definition = text_format.get("syntax"), text_format.get("definition")
        description += f"\nThe input follows this {syntax} grammar:\n{definition}"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            try:
                text["pattern"] = f"^{lark_to_regex(str(definition))}$"
            except RequestError as error:
                unbound = f"{field}.format.definition {error}"
    schema = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return {"description": description.strip(), "parameters": schema}, unbound


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function, even if cut."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        _, found, rest = arguments.partition(f'"{_INPUT}"')
        raw = rest.lstrip(" :").removeprefix('"')
        for end in range(len(raw), max(-1, len(raw) - 7), -1):
            # A cut may be within an escape, such as \u00e9.
            try:
                return str(json.loads(f'"{raw[:end]}"', strict=False)) if found else arguments
            except ValueError:
                continue
        return raw
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_response_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert `tool_choice` to the form of chat completions. Raises ApiError."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise invalid("tool_choice.tools must be a list of tools", "tool_choice")
        names = [_chosen(item) for item in listed if item.get("type") in ("function", "custom")]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": names},
        }
    if "function" in choice:
        return dict(choice)
    if choice.get("type", "function") not in ("function", "custom"):
        raise invalid(
            f"tool_choice has type {str(choice['type'])[:64]!r}, which runs at OpenAI; name a "
            "function or a custom tool",
            "tool_choice",
        )
    return _chosen(choice)


def _chosen(choice: Mapping[str, Any]) -> dict[str, Any]:
    namespace = choice.get("namespace")
    name = _full_name(str(choice.get("name") or ""), str(namespace) if namespace else None)
    return {"type": "function", "function": {"name": name}}


def chat_messages(items: Sequence[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert items to chat messages, and name each message in errors. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    assistant: dict[str, Any] | None = None  # the message to which further items are added
    for i, item in enumerate(items):
        field = f"input[{i}]"
        kind = item.type or "message"
        message: dict[str, Any] | None = None
        if kind == "message":
            if not item.role:
                raise invalid(f"{field} is a message and must have a role", "input")
            message = {"role": item.role, "content": _content(item.content)}
            if item.role == "assistant" and assistant and not assistant["content"]:
                assistant["content"] = message["content"]
                continue
            assistant = message if item.role == "assistant" else None
        elif (call := _call(item, kind, field)) or kind == "reasoning":
            if assistant is None:
                message = assistant = {"role": "assistant", "content": ""}
            if call:
                assistant.setdefault("tool_calls", []).append(call)
            elif text := _reasoning(item, field):
                before = assistant.get("reasoning_content")
                assistant["reasoning_content"] = f"{before}\n{text}" if before else text
        elif kind in _RESULTS:
            content = _result(item.output)
            message = {"role": "tool", "tool_call_id": item.call_id or "", "content": content}
            assistant = None
        else:
            note_mended(f"{field} has type {kind[:64]!r}, which is left out")
        if message is not None:
            messages.append(message)
            places.append(field)
    return messages, places


def _call(item: InputItem, kind: str, field: str) -> dict[str, Any] | None:
    """Return the tool call of an item, or None if it is no call of a tool of the client."""
    name = item.name
    if kind == "function_call":
        arguments = item.arguments
    elif kind == "custom_tool_call":
        arguments = {_INPUT: item.input}
    elif kind in _ACTIONS:
        name, source = _ACTIONS[kind]
        arguments = getattr(item, source)
    else:
        return None
    if not name:
        raise invalid(f"{field}.name is missing; send the name of the tool", "input")
    function = {"name": _full_name(name, item.namespace), "arguments": arguments}
    return {"id": item.call_id or "", "function": function}


def _content(content: str | list[ContentPart] | None) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [msgspec.to_builtins(part) for part in content]
    return content or ""


def _result(output: Any) -> str | list[Any]:
    """Return text or parts; other values, such as the output of a shell, as JSON."""
    if isinstance(output, list) and all(
        isinstance(part, dict) and "type" in part for part in output
    ):
        return output
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _reasoning(item: InputItem, field: str) -> str:
    """Return the text of the reasoning, or else of its summary."""
    parts = _content(item.content) or item.summary or ""
    if isinstance(parts, str):
        return parts
    texts = [
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else text_of_part(part, f"{field}.content[{i}]")
        for i, part in enumerate(parts)
    ]
    return "\n".join(texts)
