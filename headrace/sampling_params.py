"""Sampling parameters of a request. Names are as in vLLM."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from headrace.errors import RequestError
from headrace.structured_outputs import StructuredOutputs, bad_words
from headrace.validation import MAX_INTEGER, check_names, integer, number, token_ids

MAX_SEQUENCES = 512
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKENS = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1 << 20
_BIAS_LIMIT = 100.0


class SamplingField(NamedTuple):
    """A row of the table of sampling parameters, `SAMPLING_FIELDS`.

    The checks of `SamplingParams`, the OpenAI records, the flags of `headrace run` and
    the options of the samplers are made from these rows or tested against them.
    """

    name: str
    kind: type  # int, float or bool; object for a field with a check of its own
    is_optional: bool  # whether None is allowed
    default: Any
    bounds: tuple[float, float] | None = None  # min and max of an int or float
    excludes_min: bool = False
    neutral: tuple[float, ...] = ()  # values that a beam search allows; empty: any
    is_sampler_option: bool = False  # whether native and GPU samplers have it, under its name
    is_openai_field: bool = True  # whether OpenAI requests have a field of the same name
    metavar: str = ""  # of the flag of `headrace run`; empty: no flag
    help: str = ""


def _param(
    default: Any,
    bounds: tuple[float, float] | None = None,
    *,
    excludes_min: bool = False,
    neutral: tuple[float, ...] = (),
    is_sampler_option: bool = False,
    is_openai_field: bool = True,
    metavar: str = "",
    help: str = "",
) -> Any:
    """A field of `SamplingParams` with the cells of its row in `SAMPLING_FIELDS`."""
    cells = {
        "bounds": bounds,
        "excludes_min": excludes_min,
        "neutral": neutral,
        "is_sampler_option": is_sampler_option,
        "is_openai_field": is_openai_field,
        "metavar": metavar,
        "help": help,
    }
    return field(default=default, metadata=cells)


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """A limit of the reasoning that precedes an answer.

    After `max_tokens` tokens of reasoning the sampler writes `end`. The reasoning begins in the
    prompt, if the prompt ends with `begin`, or in the output, if the output begins with it. Raises
    RequestError, which names the field, for an invalid value.
    """

    max_tokens: int
    begin: str = "<think>"
    end: str = "</think>"

    def __post_init__(self) -> None:
        integer("thinking_budget.max_tokens", self.max_tokens, 0, MAX_INTEGER)
        for name in ("begin", "end"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"thinking_budget.{name} must be text of 1 to {MAX_STOP_CHARACTERS:,} "
                    f"characters, not {reprlib.repr(value)}"
                )


@dataclass(frozen=True, kw_only=True)
class ReasoningMarkers:
    """Texts around the reasoning that may precede an answer.

    The reasoning begins before the output (`has_begun`), or at its start, with `begin`. White space
    and `opener` may stand between `end` and the answer. Raises RequestError, which names the field,
    for an invalid value.
    """

    begin: str = "<think>"
    end: str = "</think>"
    opener: str = ""
    has_begun: bool = False

    def __post_init__(self) -> None:
        for name, least in (("begin", 1), ("end", 1), ("opener", 0)):
            value = getattr(self, name)
            if not isinstance(value, str) or not least <= len(value) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"stop_after.{name} must be text of {least} to {MAX_STOP_CHARACTERS:,} "
                    f"characters, not {reprlib.repr(value)}"
                )
        if not isinstance(self.has_begun, bool):
            raise RequestError(
                f"stop_after.has_begun must be true or false, not {reprlib.repr(self.has_begun)}"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises RequestError, which names the field, if a value is out of range.
    """

    n: int = _param(1, (1, MAX_SEQUENCES))
    """Number of continuations, each with its own random numbers; or the best `n` beams."""
    temperature: float = _param(
        1.0,
        (0.0, 100.0),
        neutral=(0.0, 1.0),
        is_sampler_option=True,
        metavar="T",
        help="sampling temperature; 0 always takes the likeliest token",
    )
    """Sampling temperature; 0 always takes the likeliest token."""
    top_p: float = _param(
        1.0,
        (0.0, 1.0),
        excludes_min=True,
        neutral=(1.0,),
        is_sampler_option=True,
        metavar="P",
        help="total probability of the smallest set of likeliest tokens to keep",
    )
    """Total probability of the smallest set of likeliest tokens to keep."""
    top_k: int = _param(
        0,
        (-1, MAX_INTEGER),
        neutral=(0, -1),
        is_sampler_option=True,
        metavar="K",
        help="number of likeliest tokens to keep; 0 keeps all",
    )
    """Number of likeliest tokens to keep; 0 or -1 keeps all."""
    min_p: float = _param(
        0.0,
        (0.0, 1.0),
        neutral=(0.0,),
        is_sampler_option=True,
        metavar="P",
        help="lowest probability of a kept token, relative to the likeliest token",
    )
    """Lowest probability of a kept token, relative to the likeliest token."""
    repetition_penalty: float = _param(
        1.0,
        (1e-6, 100.0),
        is_sampler_option=True,
        metavar="X",
        help="divisor of positive logits, factor of negative logits, of tokens in the prompt "
        "or the "
        "answer",
    )
    """Divisor of positive logits, factor of negative logits, of tokens in prompt or output."""
    presence_penalty: float = _param(
        0.0,
        (-2.0, 2.0),
        is_sampler_option=True,
        metavar="X",
        help="value subtracted from the logit of each token that is in the answer",
    )
    """Value subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = _param(
        0.0,
        (-2.0, 2.0),
        is_sampler_option=True,
        metavar="X",
        help="value subtracted from the logit of a token for each time it is in the answer",
    )
    """Value subtracted from the logit of a token for each time it is in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Value added to the logit, by token id."""
    allowed_token_ids: Sequence[int] | None = None
    """Only tokens that may be sampled. Without an end token in the list, none is sampled."""
    bad_words: Sequence[str] | None = None
    """Words that the output must not contain. The sampler never completes the token
    sequence of a word, with or without a leading space, nor a control token that the word
    names; other tokenisations of the word stay possible.
    """
    structured_outputs: StructuredOutputs | None = None
    """Format that the output must match, such as a JSON schema."""
    thinking_budget: ThinkingBudget | None = field(
        default=None, metadata={"is_openai_field": False}
    )
    """Limit of the reasoning that precedes the answer; None: no limit."""
    stop_after: ReasoningMarkers | None = field(default=None, metadata={"is_openai_field": False})
    """Reasoning in which no stop string ends the output; None: stop strings hold everywhere. Its
    markers must be visible: set `skip_special_tokens` to False if they are control tokens.
    """
    beam_width: int | None = _param(
        None,
        (1, MAX_SEQUENCES),
        is_openai_field=False,
        metavar="B",
        help="number of beams of a beam search instead of sampling; the answer comes at its end",
    )
    """Number of beams of a beam search, instead of sampling. The search ranks beams by
    log-probabilities after biases and penalties.
    """
    length_penalty: float = _param(
        1.0,
        (-10.0, 10.0),
        metavar="X",
        help="exponent in the score of a beam: sum of log-probabilities / length ** X",
    )
    """Exponent in the score of a finished beam: sum of log-probabilities / length ** exponent."""
    early_stopping: bool = _param(False, is_openai_field=False)
    """Whether a beam search ends at `beam_width` finished beams, even if a running beam
    may score higher.
    """
    seed: int | None = _param(
        None,
        (0, 2**64 - 1),
        metavar="N",
        help="seed of the random numbers; the same seed gives the same answer",
    )
    """Seed of the random numbers; the same seed gives the same tokens. None: derived
    from the engine's seed and the number of the request, or the `custom_id` in a batch.
    """
    stop: str | Sequence[str] | None = None
    """Texts that end the output; the output does not contain them. A text with the name of a
    control token sees control tokens, which the output leaves out.
    """
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output."""
    include_stop_str_in_output: bool = False
    """Whether to keep the stop text or stop token in the output."""
    ignore_eos: bool = False
    """Whether to continue after the model's end tokens."""
    max_tokens: int | None = _param(
        16,
        (1, MAX_INTEGER),
        metavar="N",
        help="maximum tokens of an answer; by default it ends where the model ends it or the "
        "context is full",
    )
    """Maximum output tokens; None: until the context is full."""
    min_tokens: int = _param(0, (0, MAX_INTEGER))
    """Minimum output tokens; end tokens and stop strings have no effect before."""
    logprobs: int | None = _param(None, (0, MAX_LOGPROBS))
    """Number of likeliest tokens to report with each output token, with log-probabilities."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens to report with each output token, in place of the likeliest; needs `logprobs`."""
    prompt_logprobs: int | None = _param(None, (0, MAX_LOGPROBS))
    """Number of likeliest tokens to report with each prompt token except the first."""
    skip_special_tokens: bool = True
    """Whether to leave control tokens out of the text."""

    def __new__(cls, **options: Any) -> "SamplingParams":
        # Runs before __init__, whose TypeError would not suggest a similar name.
        check_names("sampling parameter", options, (field.name for field in fields(cls)))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {}
        for row in _PLAIN_FIELDS:
            checked[row.name] = _checked(row, getattr(self, row.name))
        checked["logit_bias"] = _biases(self.logit_bias)
        checked["stop"] = _stops(self.stop)
        checked["stop_token_ids"] = token_ids(
            "stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids, MAX_STOPS
        )
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = token_ids(
                "allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS
            )
            if not checked["allowed_token_ids"]:
                raise RequestError("allowed_token_ids is empty; list at least one token")
        if self.logprob_token_ids is not None:
            checked["logprob_token_ids"] = self._named_tokens(self.logprob_token_ids)
        checked["bad_words"] = bad_words(self.bad_words)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(
                "structured_outputs must be StructuredOutputs, not "
                f"{type(self.structured_outputs).__name__}"
            )
        if not isinstance(self.thinking_budget, ThinkingBudget | None):
            raise RequestError(
                f"thinking_budget must be ThinkingBudget, not {type(self.thinking_budget).__name__}"
            )
        if not isinstance(self.stop_after, ReasoningMarkers | None):
            raise RequestError(
                f"stop_after must be ReasoningMarkers, not {type(self.stop_after).__name__}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )
        if self.beam_width is not None:
            self._check_beam(self.beam_width)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _named_tokens(self, value: Sequence[int]) -> list[int]:
        ids = token_ids("logprob_token_ids", value, MAX_LOGPROB_TOKENS)
        if not ids:
            raise RequestError("logprob_token_ids is empty; list at least one token")
        if self.logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs; set logprobs too")
        if self.beam_width is not None:
            raise RequestError(
                "logprob_token_ids cannot be combined with a beam search; leave one out"
            )
        return list(dict.fromkeys(ids))

    def _check_beam(self, width: int) -> None:
        if self.n > width:
            raise RequestError(
                f"n {self.n} is greater than beam_width {width}; a beam search returns at most "
                f"{width} beams"
            )
        for name, row in SAMPLING_FIELDS.items():
            if row.neutral and getattr(self, name) not in row.neutral:
                allowed = " or ".join(f"{value:g}" for value in row.neutral)
                raise RequestError(
                    f"{name} must be {allowed} in a beam search, which samples nothing, not "
                    f"{getattr(self, name):g}"
                )


def _row(param: Field[Any]) -> SamplingField:
    is_union = isinstance(param.type, UnionType)
    kinds = get_args(param.type) if is_union else (param.type,)
    return SamplingField(
        name=param.name,
        kind=kinds[0] if kinds[0] in (int, float, bool) else object,
        is_optional=NoneType in kinds,
        default=param.default,
        **param.metadata,
    )


SAMPLING_FIELDS = {param.name: _row(param) for param in fields(SamplingParams)}
"""The table of sampling parameters, by name."""
_PLAIN_FIELDS = [row for row in SAMPLING_FIELDS.values() if row.kind is not object]


def _checked(row: SamplingField, value: Any) -> Any:
    """Return the value as a plain int, float or bool. Raises RequestError if out of range."""
    if value is None and row.is_optional:
        return None
    if row.kind is bool and not isinstance(value, bool):
        raise RequestError(f"{row.name} must be true or false, not {reprlib.repr(value)}")
    if row.kind is int and row.bounds:
        return integer(row.name, value, int(row.bounds[0]), int(row.bounds[1]))
    if row.kind is float and row.bounds:
        value = number(row.name, value, *row.bounds)
        if row.excludes_min and value == row.bounds[0]:
            raise RequestError(f"{row.name} must be above {row.bounds[0]:g}")
    return value


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {reprlib.repr(value)}")
    ids = token_ids("logit_bias", value.keys(), MAX_BIASES)
    return {
        token: number("logit_bias", bias, -_BIAS_LIMIT, _BIAS_LIMIT)
        for token, bias in zip(ids, value.values(), strict=True)
    }


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop must be a string or a list of strings, not {reprlib.repr(value)}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops):,} strings; use at most {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has a string of {len(stop):,} characters; use 1 to "
                f"{MAX_STOP_CHARACTERS:,} characters"
            )
    return list(dict.fromkeys(stops))
