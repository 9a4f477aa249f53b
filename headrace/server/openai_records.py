"""JSON bodies of OpenAI's API; fields that OpenAI lacks have vLLM's names.

msgspec checks types and bounds while it parses. Unknown fields are ignored, and null counts as
absent. Bounds that depend on the model are checked later.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from headrace.request import MAX_PRIORITY, MAX_SALT_CHARACTERS, Pooling
from headrace.sampling_params import (
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    SAMPLING_FIELDS,
    SamplingField,
)
from headrace.server.field_types import (
    Biases,
    FunctionCall,
    Functions,
    MessageContent,
    Prompts,
    ResponseFormat,
    Stop,
    TextKind,
    TokenId,
    ToolCalls,
    ToolChoice,
    Tools,
)
from headrace.structured_outputs import MAX_ALLOWED_SEQUENCES, MAX_SEQUENCE_SIZE

MAX_MESSAGES = 4096
MAX_SESSION_NODES = 10_000
MAX_CONTINUATIONS = 256
"""Continuations that one request may score."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Truncation = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""Max tokens of a prompt; -1: as many as the context can hold."""
TruncationSide = Literal["left", "right"]
"""The end of a prompt that is cut off."""
_REQUEST_ID = r"^[A-Za-z0-9_.:\-]{1,128}$"
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Texts = Annotated[list[_Text], msgspec.Meta(min_length=1)]
_Sequence = (
    Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_SIZE)]
    | Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_SIZE)]
)


class StreamOptions(msgspec.Struct, frozen=True):
    """Further contents of a stream."""

    include_usage: bool | None = None
    """Whether a last chunk has the token counts of the complete output."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the token counts so far."""


class Structured(msgspec.Struct, frozen=True, kw_only=True):
    """A restriction of the text by exactly one field (`headrace.StructuredOutputs`)."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: _Text | None = None
    choice: _Texts | None = None
    grammar: _Text | None = None
    structural_tag: str | dict[str, Any] | None = None
    allowed_sequences: (
        Annotated[list[_Sequence], msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_SEQUENCES)]
        | None
    ) = None
    strict: bool | None = None


def _json_type(row: SamplingField) -> Any:
    """The type of a number or flag in JSON, with its bounds."""
    if row.bounds is None:
        return row.kind | None
    low, high = row.bounds
    meta = msgspec.Meta(gt=low, le=high) if row.excludes_min else msgspec.Meta(ge=low, le=high)
    return Annotated[row.kind, meta] | None


_OWN_FORM = ("seed", "logprobs")
"""Fields whose form in a request differs from the form in `SamplingParams`."""

_NOT_SHARED = ("n", "max_tokens", "min_tokens", "prompt_logprobs", "length_penalty")
"""Plain fields that the Responses API lacks."""


def _plain_fields(name: str, base: type, only: Collection[str] = ()) -> Any:
    """Add numbers and flags of the table of sampling parameters to a record, with its bounds."""
    rows = [
        row
        for row in SAMPLING_FIELDS.values()
        if row.is_openai_field and row.kind is not object and row.name not in _OWN_FORM
    ]
    fields = [
        (row.name, _json_type(row), None)
        for row in rows
        if (row.name in only if only else row.name not in _NOT_SHARED)
    ]
    return msgspec.defstruct(name, fields, bases=(base,), frozen=True, kw_only=True)


if TYPE_CHECKING:

    class _PlainFields(msgspec.Struct, frozen=True, kw_only=True):
        temperature: float | None = None
        top_p: float | None = None

else:
    _PlainFields = _plain_fields("_PlainFields", msgspec.Struct)


class SharedSampling(_PlainFields, frozen=True, kw_only=True):
    """Fields that chat completions, completions and the Responses API share."""

    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_LOGPROB_TOKENS)] | None
    ) = None
    bad_words: _Texts | None = None
    structured_outputs: Structured | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] | None = None


if TYPE_CHECKING:

    class _MorePlainFields(SharedSampling, frozen=True, kw_only=True):
        n: int | None = None
        max_tokens: int | None = None
        prompt_logprobs: int | None = None

else:
    _MorePlainFields = _plain_fields("_MorePlainFields", SharedSampling, only=_NOT_SHARED)


class Sampling(_MorePlainFields, frozen=True, kw_only=True):
    """Fields that chat completions and completions share."""

    stream_options: StreamOptions | None = None
    # Other names for the fields of `structured_outputs`: vLLM's older ones, llama.cpp's and
    # SGLang's.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: _Text | None = None
    guided_choice: _Texts | None = None
    guided_grammar: _Text | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: _Text | None = None
    grammar: _Text | None = None
    ebnf: _Text | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: TruncationSide | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Max tokens of reasoning; -1: no limit."""
    request_id: Annotated[str, msgspec.Meta(pattern=_REQUEST_ID)] | None = None
    stream_interval: _Count | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model writes reasoning first."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: _Count | None = None

    @property
    def is_on(self) -> bool | None:
        """None: the model decides."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is supported."""

    type: TextKind
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[Any] | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: MessageContent = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Small | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = None
    echo: bool | None = None
    # The form of tools before `tools`.
    functions: Functions | None = None
    function_call: FunctionCall | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: _Small | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """0 writes nothing; with `echo` or `prompt_logprobs` such a request scores its prompt."""
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    """How token vectors become one vector: last token, mean, or first token (`cls`)."""
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: TruncationSide | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages`, or llama.cpp's `content`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    # llama.cpp's names.
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


_SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_SessionText = _Text | Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sessions`: either `prompt` or `messages`."""

    prompt: _SessionText | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Base seed of the sampled nodes."""
    ttl: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    """Seconds without a request after which the session ends."""
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SESSION_NODES)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] | None = None
    add_special_tokens: bool | None = None


class SessionNodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sessions/close`, and the fields that all routes of a node share."""

    session: _SessionId
    node: _NodeName = "0"
    """Name of the node; `0` is the root."""


class SessionExtendRequest(SessionNodeRequest, frozen=True, kw_only=True):
    """`POST /v1/sessions/extend`."""

    text: _SessionText
    """Text or token ids of the child."""


class SessionForkRequest(SessionNodeRequest, frozen=True, kw_only=True):
    """`POST /v1/sessions/fork`."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)]


class SessionRollbackRequest(SessionNodeRequest, frozen=True, kw_only=True):
    """`POST /v1/sessions/rollback`."""

    to: _Count
    """Tokens of the path that stay."""


class SessionScoreRequest(SessionNodeRequest, frozen=True, kw_only=True):
    """`POST /v1/sessions/score`."""

    continuations: Annotated[
        list[_SessionText], msgspec.Meta(min_length=1, max_length=MAX_CONTINUATIONS)
    ]
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class SessionSampleRequest(SharedSampling, frozen=True, kw_only=True):
    """`POST /v1/sessions/sample`. The session has `cache_salt`, and nothing is streamed."""

    session: _SessionId
    node: _NodeName = "0"
    k: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Number of children; 1 by default."""
    max_tokens: _Count | None = None
    logprobs: bool | None = None
    """Whether the nodes have the log-probabilities of their tokens."""


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
