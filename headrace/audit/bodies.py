"""JSON bodies of OpenAI-compatible servers, as far as an audit reads them.

msgspec checks the types while it parses. Fields that no record names are ignored.
"""

from typing import Any

import msgspec


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float | None = None


class ScoredToken(msgspec.Struct, frozen=True):
    """A token of the text, with its log-probability."""

    token: str
    logprob: float | None = None
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities in the shape of chat completions (`content`) or of completions."""

    content: list[ScoredToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Message(msgspec.Struct, frozen=True):
    """The text of a chat, or a part of it in a stream."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """Reasoning and content."""
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class Choice(msgspec.Struct, frozen=True):
    """One output, or a part of it in a stream."""

    index: int = 0
    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    @property
    def piece(self) -> str:
        """The text, whatever the API."""
        message = self.message or self.delta
        return message.text if message else self.text or ""


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens by origin."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int | None:
        """Prompt tokens from the prefix cache; None if the server reports no such count."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details else None


class Body(msgspec.Struct, frozen=True):
    """A response, or an event of a stream."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    timings: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    @property
    def num_drafted(self) -> int | None:
        """Draft tokens of the request; None if the server reports no such count."""
        count = (self.timings or {}).get("draft_n")
        return count if isinstance(count, int) else None


class Model(msgspec.Struct, frozen=True):
    """An entry of the list of models."""

    id: str


class Models(msgspec.Struct, frozen=True):
    """`GET /v1/models`."""

    data: list[Model] = []


class Tokens(msgspec.Struct, frozen=True):
    """`POST /tokenize` of Headrace, vLLM and llama.cpp."""

    tokens: list[Any] = []
