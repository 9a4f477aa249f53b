"""JSON bodies of Anthropic's API; msgspec checks types and bounds while it parses."""

from typing import Annotated, Any, Literal

import msgspec

from headrace.request import MAX_SALT_CHARACTERS
from headrace.server.field_types import FUNCTION_NAME, MAX_TOOLS, BlockKind, StopTexts
from headrace.server.openai_records import MAX_MESSAGES, Thinking, TopP

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Block(msgspec.Struct, frozen=True):
    """A part of a message: text, thinking, a tool call, a tool's result, or a source of text.

    Earlier blocks may be malformed, so that only the fields of texts have strict types.
    """

    type: BlockKind
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    source: Any = None
    title: Any = None
    tool: Any = None
    tool_name: Any = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: str | list[Block] | None


class AnthropicTool(msgspec.Struct, frozen=True):
    """A function that the model may call; tools of other types are left out."""

    type: str | None = None
    name: Annotated[str, msgspec.Meta(pattern=FUNCTION_NAME)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    """The tools that the model may or must call; `name` is for type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(msgspec.Struct, frozen=True):
    """A JSON schema that the text must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """The amount of reasoning, and the format of the text."""

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """An older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: _Count
    stream: bool | None = None
    temperature: _Share | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: StopTexts | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] | None = None
