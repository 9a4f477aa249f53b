"""JSON bodies of OpenAI's Responses API; msgspec checks types and bounds while it parses."""

from typing import Annotated

import msgspec

from headrace.server.field_types import FlatToolChoice, FlatTools, ItemKind, TextOptions
from headrace.server.openai_records import MAX_MESSAGES, ContentPart, TopP

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class InputItem(msgspec.Struct, frozen=True):
    """A message, a tool call, a tool's result, or reasoning."""

    type: ItemKind | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Options of the model's reasoning."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: FlatTools | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
