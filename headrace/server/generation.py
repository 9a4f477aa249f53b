"""What chat completions and completions have in common: sampling parameters, choices as they grow,
usage, and log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.request import Logprobs, SamplingParams
from headrace.server.errors import invalid
from headrace.server.metrics import Metrics
from headrace.server.openai_records import Sampling
from headrace.server.served_model import seed_of, timed_out
from headrace.server.structured import structured_outputs

_LEAST_LOGPROB = -9999.0
"""What JSON has for minus infinity."""
_SAME_NAME = (
    *(
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
    ),
    *(
        "ignore_eos",
        "skip_special_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "prompt_logprobs",
    ),
    *("length_penalty", "allowed_token_ids", "bad_words"),
)


def sampling_params(
    asked: Sampling,
    advised: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    **further: Any,
) -> SamplingParams:
    """The engine's parameters for a request, over those that the model's authors advise. Raises
    ApiError, which names the field.
    """
    options = ({} if asked.use_beam_search else dict(advised)) | {
        name: value for name in _SAME_NAME if (value := getattr(asked, name)) is not None
    }
    options |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "seed": seed_of(asked.seed),
        "logit_bias": asked.logit_bias,
    }
    options["structured_outputs"] = structured_outputs(asked)
    if asked.use_beam_search:
        options |= {"beam_width": asked.n or 1, "temperature": 0.0}
    try:
        return SamplingParams(**options | further)
    except RequestError as error:
        raise invalid(str(error), str(error).split(" ", 1)[0]) from None


@dataclass
class Choice:
    """One continuation, as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)

    def add(self, news: frames.News) -> None:
        """Take what a step brought."""
        self.pieces.append(news.text)
        self.token_ids += news.token_ids
        self.logprobs += news.logprobs
        if news.finish_reason:
            self.finish_reason, self.stop_reason = finish_reason(news), news.stop_reason


def finish_reason(news: frames.News) -> str | None:
    """Why a continuation ended, in OpenAI's words; None while it goes on. Raises ApiError where its
    time was up.
    """
    if news.finish_reason == "timeout":
        raise timed_out()
    if news.finish_reason in ("abort", "error"):
        return None  # how the request ended says why
    return news.finish_reason


@dataclass
class Usage:
    """The tokens of a request, counted as they come."""

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    """Of the completion: tokens by which nothing but reasoning came."""

    def as_json(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Clock:
    """Times of one request, for the metrics and for its answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = monotonic()
        self._last: float | None = None
        self.timing: dict[str, float] = {}

    def tokens(self, count: int) -> None:
        """So many tokens have come."""
        now = monotonic()
        if self._last is None:
            self._metrics.first_token_came(now - self._begun)
        elif count:
            self._metrics.between_tokens.observe((now - self._last) / count)
        self._last = now

    def ended(self, event: frames.Ended) -> None:
        """The request has ended. Raises RefusedError where it failed."""
        if event.error:
            self._metrics.requests.labels("error").inc()
            raise RefusedError(event.error.kind, event.error.message)
        self._metrics.queue.observe(event.queue)
        self._metrics.prefill.observe(event.prefill)
        self._metrics.decode.observe(event.decode)
        self._metrics.requests.labels("completed").inc()
        self.timing = {"queue": event.queue, "prefill": event.prefill, "decode": event.decode}


def logprob(value: float) -> float:
    """A log-probability as JSON can say it."""
    return max(value, _LEAST_LOGPROB)


def chat_logprobs(entries: list[Logprobs], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities as chat completions give them: the token, then its `top` likeliest
    rivals.
    """
    return {"content": [_chat_entry(entry, top, tokenizer) for entry in entries], "refusal": None}


def _chat_entry(entry: Logprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    (token, own), *_ = entry.items()
    likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:top]

    def described(token_id: int, value: float, text: str) -> dict[str, Any]:
        return {
            "token": text,
            "logprob": logprob(value),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return described(token, own.logprob, own.decoded_token) | {
        "top_logprobs": [
            described(other, one.logprob, one.decoded_token) for other, one in likeliest
        ]
    }


def completion_logprobs(
    entries: Sequence[Logprobs | None],
    tokens: list[int],
    top: int,
    offset: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Log-probabilities as completions give them; `offset` is that of the first token's text. An
    entry of None is of a first token.
    """
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, entry in zip(tokens, entries, strict=True):
        text = (
            entry[token].decoded_token
            if entry
            else tokenizer.token_bytes(token).decode(errors="replace")
        )
        result["tokens"].append(text)
        result["token_logprobs"].append(logprob(entry[token].logprob) if entry else None)
        result["top_logprobs"].append(_top(entry, top) if entry else None)
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def _top(entry: Mapping[int, Any], top: int) -> dict[str, float]:
    likeliest = sorted(entry.values(), key=lambda one: one.rank)
    return {one.decoded_token: logprob(one.logprob) for one in likeliest[: max(top, 1)]}
