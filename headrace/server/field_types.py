"""Types of request fields, with their JSON schemas for `/openapi.json`."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS

MAX_PROMPTS = 256
MAX_TOOLS = 256
MAX_TOKEN_ID = 2**31 - 1
TEXT_KINDS = ("text", "input_text", "output_text", "reasoning_text")
BLOCK_KINDS = (
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "document",
    "search_result",
    "tool_reference",
    "tool_addition",
    "tool_removal",
)
FUNCTION_NAME = r"^[A-Za-z0-9_.\-]{1,128}$"
ITEM_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "reasoning",
    "item_reference",
    "web_search_call",
    "compaction",
)


def _one_of(kinds: tuple[str, ...]) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"enum": list(kinds)})


def _object(optional: Mapping[str, Any] | None = None, /, **required: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": required | dict(optional or {}),
    }


_PARAMETERS = {"parameters": {"type": ["object", "null"]}}
_FUNCTION = _object(_PARAMETERS, name={"type": "string", "pattern": FUNCTION_NAME})
_FLAT_FUNCTION = _object(
    _PARAMETERS, type={"const": "function"}, name=_FUNCTION["properties"]["name"]
)
_CUSTOM = _object(type={"const": "custom"}, name=_FUNCTION["properties"]["name"])
_NAMESPACE = _object(
    type={"const": "namespace"},
    name=_FUNCTION["properties"]["name"],
    tools={"type": "array", "items": {"anyOf": [_FLAT_FUNCTION, _CUSTOM]}},
)
_HOSTED = _object(type={"enum": ["web_search", "image_generation", "local_shell", "tool_search"]})
_SCHEMA = _object(schema={"type": "object"})
_NAMED = _object(name={"type": "string"})

TextKind = Annotated[str, _one_of(TEXT_KINDS)]
MessageContent = str | list[Any] | dict[str, Any] | int | float | bool | None
"""Text or parts. Results of tools may be any JSON; `messages` reads them leniently."""
BlockKind = Annotated[str, _one_of(BLOCK_KINDS)]
ItemKind = Annotated[
    str, msgspec.Meta(extra_json_schema={"anyOf": [{"enum": list(ITEM_KINDS)}, {"type": "string"}]})
]
"""An empty type is that of a message. Items of other types are left out."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_Prompt = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
_PROMPTS = {
    "minItems": 1,
    "anyOf": [
        {"items": {"type": "integer"}},
        {"items": {"type": ["string", "array"]}, "maxItems": MAX_PROMPTS},
    ],
}
Prompts = str | Annotated[list[str | TokenId | _Prompt], msgspec.Meta(extra_json_schema=_PROMPTS)]

_StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[_StopText], msgspec.Meta(max_length=MAX_STOPS)]
Stop = _StopText | StopTexts

Biases = Annotated[
    dict[TokenId, Annotated[float, msgspec.Meta(ge=-100, le=100)]],
    msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}}),
]

Tools = Annotated[
    list[
        Annotated[
            dict[str, Any],
            msgspec.Meta(extra_json_schema=_object(type={"const": "function"}, function=_FUNCTION)),
        ]
    ],
    msgspec.Meta(max_length=MAX_TOOLS),
]
FlatTools = Annotated[
    list[
        Annotated[
            dict[str, Any],
            msgspec.Meta(
                extra_json_schema={"anyOf": [_FLAT_FUNCTION, _CUSTOM, _NAMESPACE, _HOSTED]}
            ),
        ]
    ],
    msgspec.Meta(max_length=MAX_TOOLS),
]
"""Tools of the Responses API: the function's fields stand next to the type."""
Functions = Annotated[
    list[Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_FUNCTION)]],
    msgspec.Meta(min_length=1, max_length=MAX_TOOLS),
]
"""Tools in the form before `tools`."""
ToolCalls = Annotated[
    list[Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_object(function=_NAMED))]],
    msgspec.Meta(max_length=MAX_TOOLS),
]
_Choice = Annotated[str, _one_of(("none", "auto", "required"))]
_MODE = {"enum": ["auto", "required"]}
_ALLOWED = _object(
    type={"const": "allowed_tools"},
    allowed_tools=_object(mode=_MODE, tools={"type": "array", "items": _object(function=_NAMED)}),
)
_FLAT_ALLOWED = _object(
    type={"const": "allowed_tools"}, mode=_MODE, tools={"type": "array", "items": _NAMED}
)
ToolChoice = (
    _Choice
    | Annotated[
        dict[str, Any],
        msgspec.Meta(extra_json_schema={"anyOf": [_object(function=_NAMED), _ALLOWED]}),
    ]
)
FunctionCall = (
    Annotated[str, _one_of(("none", "auto"))]
    | Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_NAMED)]
)
FlatToolChoice = (
    _Choice
    | Annotated[
        dict[str, Any],
        msgspec.Meta(
            extra_json_schema={"anyOf": [_object(function=_NAMED), _NAMED, _FLAT_ALLOWED]}
        ),
    ]
)

_FORMATS = [
    _object(type={"enum": ["text", "json_object"]}),
    _object(type={"const": "json_schema"}, json_schema=_SCHEMA),
    _object(type={"const": "json_schema"}, schema={"type": "object"}),
    _object(type={"const": "structural_tag"}),
]
ResponseFormat = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"anyOf": _FORMATS})]
TextOptions = Annotated[
    dict[str, Any],
    msgspec.Meta(
        extra_json_schema={"properties": {"format": {"anyOf": [{"type": "null"}, *_FORMATS]}}}
    ),
]
