"""JSON bodies of OpenAI's Responses API; msgspec checks types and bounds while it parses."""

from typing import Annotated, Any

import msgspec

from headrace.sampling_params import MAX_LOGPROBS
from headrace.server.field_types import FlatToolChoice, FlatTools, ItemKind, TextOptions
from headrace.server.openai_records import MAX_MESSAGES, ContentPart, SharedSampling

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class InputItem(msgspec.Struct, frozen=True):
    """A message, a tool call, a tool's result, or reasoning; other items are left out.

    Earlier items may be malformed, so that only the fields of messages have strict types.
    """

    type: ItemKind | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Any = None
    summary: Any = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Options of the model's reasoning."""

    effort: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream; none of them changes it."""


class ResponsesRequest(SharedSampling, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: FlatTools | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` asks for log-probabilities. The other names add nothing: the
    items that they belong to are never in a response."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report with each token; None: report nothing."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return None
