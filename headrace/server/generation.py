"""Sampling parameters, choices, usage and timing of the routes that generate text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.outputs import Logprobs
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.sampling_params import SAMPLING_FIELDS, SamplingParams
from headrace.server.errors import ApiError, invalid, request_error
from headrace.server.metrics import Metrics
from headrace.server.openai_records import Sampling, SharedSampling
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.response_format import structured_outputs
from headrace.server.state import timeout_error, unsigned_seed
from headrace.server.stopwatch import Stopwatch

_CONVERTED = (
    "max_tokens",
    "logprobs",
    "seed",
    "logit_bias",
    "structured_outputs",
)
_SAME_NAME = [
    row.name
    for row in SAMPLING_FIELDS.values()
    if row.is_openai_field and row.name not in _CONVERTED
]


def sampling_params(
    request: SharedSampling,
    advised: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    strict_schemas: bool = True,
) -> SamplingParams:
    """Make the engine's sampling parameters. Raises ApiError, which names the wrong field.

    `advised` fills fields that the request leaves out, except in beam search.
    """
    is_beam_search = isinstance(request, Sampling) and request.use_beam_search
    options = {} if is_beam_search else dict(advised)
    options |= given_fields(request, _SAME_NAME)
    options |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "seed": unsigned_seed(request.seed),
        "logit_bias": request.logit_bias,
        "structured_outputs": structured_outputs(request, strict_schemas),
    }
    if is_beam_search:
        options |= {"beam_width": options.get("n", 1), "temperature": 0.0}
    if prompt_logprobs is not None:
        options["prompt_logprobs"] = prompt_logprobs
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise request_error(str(error)) from None


def limit_thinking(
    params: SamplingParams, output_format: OutputFormat, request: Sampling
) -> SamplingParams:
    """Apply `thinking_token_budget`. Raises ApiError if the model's reasoning is unknown."""
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return params
    found = output_format.thinking_budget(budget)
    if found is None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "thinking_token_budget is not supported: the chat template of this model has no "
            "reasoning; see --reasoning-parser",
            param="thinking_token_budget",
        )
    return replace(params, thinking_budget=found)


def check_stream(request: Sampling) -> None:
    """Raise ApiError for fields that only a stream has, or that no stream has."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream; set stream to true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(
            400,
            "unsupported_parameter",
            "prompt_logprobs is not supported in a stream; leave stream out",
            param="prompt_logprobs",
        )


def given_fields(request: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(request, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


@dataclass
class Choice:
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def mean_logprob(self) -> float:
        sampled = [next(iter(entry.values())).logprob for entry in self.logprobs]
        return sum(sampled) / max(len(sampled), 1)

    def add(self, output: frames.StepOutput) -> None:
        self.pieces.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason:
            self.finish_reason = finish_reason(output)
            self.stop_reason = output.stop_reason


def finish_reason(output: frames.StepOutput) -> str | None:
    """Return OpenAI's finish reason; None if the sequence continues, was aborted or failed.

    Raises ApiError if the request timed out.
    """
    if output.finish_reason == "timeout":
        raise timeout_error()
    if output.finish_reason in ("abort", "error"):
        return None
    return output.finish_reason


@dataclass
class Usage:
    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class StreamInterval:
    """Joins the outputs of a stream into pieces of at least `min_tokens` tokens.

    The first output and the last are never held back.
    """

    def __init__(self, min_tokens: int | None) -> None:
        self._min_tokens = min_tokens or 1
        self._held: dict[int, frames.StepOutput] = {}
        self._started: set[int] = set()

    def push(self, index: int, output: frames.StepOutput) -> frames.StepOutput | None:
        """Return the output to send of choice `index`, or None."""
        if held := self._held.pop(index, None):
            output = msgspec.structs.replace(
                output,
                text=held.text + output.text,
                token_ids=held.token_ids + output.token_ids,
                logprobs=held.logprobs + output.logprobs,
            )
        is_enough = len(output.token_ids) >= self._min_tokens or index not in self._started
        if is_enough or output.finish_reason:
            self._started.add(index)
            return output
        self._held[index] = output
        return None


class RequestTimer:
    """Measures one prompt of the request that `stopwatch` measures."""

    def __init__(self, metrics: Metrics, stopwatch: Stopwatch) -> None:
        self._metrics = metrics
        self._stopwatch = stopwatch
        self._start = monotonic()
        self._last_tokens: dict[int, float] = {}
        self._ended: frames.Ended | None = None

    def add_tokens(self, index: int, count: int) -> None:
        """Measure tokens of the sequence `index`, when they arrive."""
        now = monotonic()
        if not self._last_tokens:
            self._metrics.observe_first_token(now - self._start)
        if index in self._last_tokens and count:
            self._metrics.observe_tokens(now - self._last_tokens[index], count)
        self._last_tokens[index] = now

    def end(self, ended: frames.Ended) -> None:
        if ended.error:
            raise RefusedError(ended.error.kind, ended.error.message)
        self._ended = ended

    @property
    def timing(self) -> dict[str, float]:
        """Parts of the time until now, in seconds, after the end of the request."""
        return self._stopwatch.parts(self._ended) if self._ended else {}
