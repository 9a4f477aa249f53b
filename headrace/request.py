"""What is asked of the engine and what it answers: records, and the checks that need no model.
Names as in vLLM.
"""

import difflib
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import islice
from numbers import Integral, Real
from operator import length_hint
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from headrace.errors import RequestError
from headrace.structured_outputs import StructuredOutputs, bad_words

if TYPE_CHECKING:  # the command line reads these records before it has need of arrays
    import numpy as np
    from numpy.typing import NDArray

    from headrace.constraint import Constraint

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Pooling = Literal["last", "mean", "cls"]

MAX_SEQUENCES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1 << 20
MAX_PRIORITY = 1000
MAX_SALT_CHARACTERS = 1024
_MAX_SECONDS = 1e9
_MAX_COUNT = 2**31 - 1

_BIAS_LIMIT = 100.0


class SamplingField(NamedTuple):
    """A row of the table of sampling parameters, `SAMPLING_FIELDS`.

    The checks of `SamplingParams`, the OpenAI records, the flags of `headrace run` and the options
    of the samplers are made from these rows or tested against them.
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
class SamplingParams:
    """How to continue one prompt. Raises RequestError, which names the field, for values out of
    range.
    """

    n: int = _param(1, (1, MAX_SEQUENCES))
    """Continuations of the prompt, each under its own noise, or the best of a beam search."""
    temperature: float = _param(
        1.0,
        (0.0, 100.0),
        neutral=(0.0, 1.0),
        is_sampler_option=True,
        metavar="T",
        help="sampling temperature; 0 always takes the likeliest token",
    )
    """0 takes the likeliest token every time."""
    top_p: float = _param(
        1.0,
        (0.0, 1.0),
        excludes_min=True,
        neutral=(1.0,),
        is_sampler_option=True,
        metavar="P",
        help="total probability of the smallest set of likeliest tokens to keep",
    )
    """Keep the smallest set of likeliest tokens that has this share of the probability."""
    top_k: int = _param(
        0,
        (-1, _MAX_COUNT),
        neutral=(0, -1),
        is_sampler_option=True,
        metavar="K",
        help="number of likeliest tokens to keep; 0 keeps all",
    )
    """Keep this many of the likeliest tokens; 0 or -1: all."""
    min_p: float = _param(
        0.0,
        (0.0, 1.0),
        neutral=(0.0,),
        is_sampler_option=True,
        metavar="P",
        help="lowest probability of a kept token, relative to the likeliest token",
    )
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = _param(
        1.0,
        (1e-6, 100.0),
        is_sampler_option=True,
        metavar="X",
        help="divisor of positive logits, factor of negative logits, of tokens in the prompt or the "
        "answer",
    )
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output.
    """
    presence_penalty: float = _param(
        0.0,
        (-2.0, 2.0),
        is_sampler_option=True,
        metavar="X",
        help="value subtracted from the logit of each token that is in the answer",
    )
    """Taken from the logits of tokens that are in the output."""
    frequency_penalty: float = _param(
        0.0,
        (-2.0, 2.0),
        is_sampler_option=True,
        metavar="X",
        help="value subtracted from the logit of a token for each time it is in the answer",
    )
    """Taken from the logits of tokens in the output, once for each time they are there."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw these tokens alone; an end token that is not among them is never drawn."""
    bad_words: Sequence[str] | None = None
    """Words that are not to come, as far as the tokenizer writes them with and without a space
    before in one way: the last token of each is not drawn where the output ends with its others.
    """
    structured_outputs: StructuredOutputs | None = None
    """What the output must be."""
    beam_width: int | None = _param(
        None,
        (1, MAX_SEQUENCES),
        is_openai_field=False,
        metavar="B",
        help="number of beams of a beam search instead of sampling; the answer comes at its end",
    )
    """Search with so many beams, and draw nothing. Beams are ranked by log-probabilities with
    biases and penalties applied.
    """
    length_penalty: float = _param(
        1.0,
        (-10.0, 10.0),
        metavar="X",
        help="exponent in the score of a beam: sum of log-probabilities / length ** X",
    )
    """The score of a finished beam is the sum of its log-probabilities / output tokens **
    length_penalty.
    """
    early_stopping: bool = _param(False, is_openai_field=False)
    """End a beam search with the first `beam_width` finished beams, even if one that goes on scores
    higher.
    """
    seed: int | None = _param(
        None,
        (0, 2**64 - 1),
        metavar="N",
        help="seed of the random numbers; the same seed gives the same answer",
    )
    """The same seed gives the same tokens; None: derived from the engine's seed and the number of
    the request.
    """
    stop: str | Sequence[str] | None = None
    """Text that ends the output and is not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output."""
    include_stop_str_in_output: bool = False
    """Keep the text that ended the output."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    max_tokens: int | None = _param(
        16,
        (1, _MAX_COUNT),
        metavar="N",
        help="maximum tokens of an answer; by default it ends where the model ends it or the "
        "context is full",
    )
    """Most output tokens; None: up to the end of the context."""
    min_tokens: int = _param(0, (0, _MAX_COUNT))
    """No end token and no stop string before so many output tokens."""
    logprobs: int | None = _param(None, (0, MAX_LOGPROBS))
    """Log-probabilities of each output token and of this many of the likeliest."""
    prompt_logprobs: int | None = _param(None, (0, MAX_LOGPROBS))
    """The same for each prompt token but the first."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""

    def __new__(cls, **options: Any) -> "SamplingParams":
        # Comes before __init__, whose TypeError would not say which name was meant.
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
                raise RequestError("allowed_token_ids is empty, so no token could be drawn")
        checked["bad_words"] = bad_words(self.bad_words)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(
                "structured_outputs must be StructuredOutputs, not "
                f"{type(self.structured_outputs).__name__}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}"
            )
        if self.beam_width is not None:
            self._check_beam(self.beam_width)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_beam(self, width: int) -> None:
        if self.n > width:
            raise RequestError(
                f"n is {self.n}, and a search with beam_width {width} has no more than "
                f"{width} results"
            )
        for name, row in SAMPLING_FIELDS.items():
            if row.neutral and getattr(self, name) not in row.neutral:
                allowed = " or ".join(f"{value:g}" for value in row.neutral)
                raise RequestError(
                    f"a beam search draws nothing, so {name} must be {allowed}, not "
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
    """An int, float or bool as a plain value. Raises RequestError if it is out of range."""
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


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How to embed one prompt. Raises RequestError, which names the field, for values that there
    are not.
    """

    pooling: Pooling = "last"
    """Which rows behind the model's last norm make the vector: that of the last token, the mean of
    all, or that of the first (`cls`).
    """
    normalise: bool = False
    """Whether the vector is brought to a length of 1."""

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RequestError(
                f"pooling must be {', '.join(get_args(Pooling))}, not {reprlib.repr(self.pooling)}"
            )
        if not isinstance(self.normalise, bool):
            raise RequestError(
                f"normalise must be true or false, not {reprlib.repr(self.normalise)}"
            )


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request besides its sampling parameters: scheduling, cache and adapter.

    A caller may build a record with any values. `Engine.check` calls `checked`.
    """

    priority: int = 0
    """The scheduler serves lower numbers first. Waiting requests rise by one level for each
    `STEPS_PER_PRIORITY` steps.
    """
    timeout: float | None = None
    """Seconds after submission at which the request ends with its output so far; None: never."""
    cache_salt: str | None = None
    """Only requests with the same salt share KV in the prefix cache."""
    adapter: str | None = None
    """Name of the loaded LoRA adapter to run with; None: the model without an adapter."""

    def checked(self) -> "RequestOptions":
        """Return the options as plain ints, floats and strings.

        Raises RequestError, which names the field, for a value of a wrong type or out of range.
        The engine knows whether the adapter is loaded, so `Engine.check` checks that field.
        """
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and len(salt) <= MAX_SALT_CHARACTERS):
            raise RequestError(
                f"cache_salt must be text of at most {MAX_SALT_CHARACTERS:,} characters, not "
                f"{reprlib.repr(salt)}"
            )
        timeout = self.timeout
        return RequestOptions(
            priority=integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
            timeout=None if timeout is None else number("timeout", timeout, 0.0, _MAX_SECONDS),
            cache_salt=salt,
            adapter=self.adapter,
        )


DEFAULT_OPTIONS = RequestOptions()


class CheckedRequest(NamedTuple):
    """A request that `Engine.check` accepted; only that method makes one."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None
    """Text of the prompt, if the caller gave text."""
    options: RequestOptions
    pooling: PoolingParams | None = None
    """How to embed the prompt; None: the engine continues the prompt."""
    constraint: "Constraint | None" = None
    """Grammar that the outputs must match."""
    output_token_ids: Sequence[Sequence[int]] = ()
    """Tokens that another engine already generated, for each continuation. The engine continues
    after them and reports only new tokens. Empty: a fresh request.
    """


class Logprob(NamedTuple):
    """A token's log-probability under the raw distribution, and its rank there (1 is the
    likeliest).
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""By token id: the token itself, then the likeliest ones."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a request spent waiting, until its first token, and from there to its end: they
    sum to its whole time.
    """

    queue: float
    prefill: float
    decode: float


class DraftStats(NamedTuple):
    """What came of one proposer."""

    steps: int = 0
    """Steps of a sequence that had a draft of it."""
    proposed: int = 0
    """Draft rows in these steps."""
    accepted: int = 0
    """Those that were right: tokens beyond the one that a step gives anyway."""
    seconds_saved: float = 0.0
    """Estimated: the plain steps that were not needed, less what draft rows took, and to find them;
    below 0 where speculation lost time.
    """

    def plus(self, other: "DraftStats") -> "DraftStats":
        """Both together."""
        return DraftStats(
            self.steps + other.steps,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.seconds_saved + other.seconds_saved,
        )

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft rows that were right."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step with a draft gave a sequence, its own one included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation. In a beam search `index` is its rank, 0 the best."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    cumulative_logprob: float | None
    """Sum of the log-probabilities of its tokens, where they are asked for; of a beam always, and
    of those that it was ranked by.
    """
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; None for the model's own end token and for a
    length.
    """


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All that became of a request. `prompt_logprobs[0]` is None: nothing precedes the first
    token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    timing: Timing
    error: Exception | None = None
    """Why the request failed, where a `finish_reason` is `error`."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request was admitted."""
    drafts: Mapping[str, DraftStats] = field(default_factory=dict)
    """What came of speculation, by method."""
    embedding: "NDArray[np.float32] | None" = None  # [dim]
    """Of a prompt that was embedded; None where it was not, or not to its end."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brought to one continuation of a request. Those of a beam search come all at its
    end, each with all its text.
    """

    request_id: str
    index: int
    text: str
    """New text. It is never taken back: what may yet become a stop string is held."""
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop token id or stop string that ended it."""
    result: RequestOutput | None
    """The whole result, with the last update of the request."""


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise RequestError for the first given name that is not known, with the nearest one
    that is.
    """
    known = list(known)
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = (
                f"; did you mean {nearest[0]}?" if nearest else f"; choose from: {', '.join(known)}"
            )
            raise RequestError(f"unknown {what} {reprlib.repr(name)}{hint}")


def integer(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int within bounds. Raises RequestError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or not least <= int(value) <= most
    ):
        raise RequestError(
            f"{name} must be a whole number from {least:,} to {most:,}, not {reprlib.repr(value)}"
        )
    return int(value)


def token_ids(
    name: str, values: object, limit: int, too_many: str = "{name} has more than {limit:,} entries"
) -> list[int]:
    """`values` as a list of at most `limit` ints that may be token ids.

    Raises RequestError, with the message `too_many` for more than `limit` values; {count} in it
    says how many there are. Where their number is known, it is looked at before the first of them.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of token ids, not {reprlib.repr(values)}")
    count = length_hint(values)
    try:
        ids = list(islice(values, limit + 1)) if count <= limit else []
    except TypeError:  # an array without dimensions
        raise RequestError(
            f"{name} must be a list of token ids, not {reprlib.repr(values)}"
        ) from None
    if count > limit or len(ids) > limit:
        how_many = f"{count:,}" if count > limit else f"more than {limit:,}"
        raise RequestError(too_many.format(name=name, limit=limit, count=how_many))
    if (
        set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _MAX_COUNT
    ):  # the same as below, at a fiftieth of the time
        return ids
    return [integer(name, token, 0, _MAX_COUNT) for token in ids]


def number(name: str, value: object, least: float, most: float) -> float:
    """`value` as a float within bounds. Raises RequestError."""
    try:
        checked = (
            math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        )
    except OverflowError:
        checked = math.inf
    if not least <= checked <= most:  # NaN is not
        raise RequestError(
            f"{name} must be a number from {least:g} to {most:g}, not {reprlib.repr(value)}"
        )
    return checked


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
        raise RequestError(f"stop has {len(stops):,} strings, more than {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has a string of {len(stop):,} characters; it must have 1 to "
                f"{MAX_STOP_CHARACTERS:,}"
            )
    return list(dict.fromkeys(stops))
