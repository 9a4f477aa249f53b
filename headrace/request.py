"""Requests to an engine. Results are in `outputs.py`, sampling parameters in
`sampling_params.py`.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.validation import integer, number

if TYPE_CHECKING:
    from headrace.constraint import Constraint

Pooling = Literal["last", "mean", "cls"]

MAX_PRIORITY = 1000
MAX_SALT_CHARACTERS = 1024
_MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of the embedding of one prompt.

    Raises RequestError, which names the field, if a value is unknown.
    """

    pooling: Pooling = "last"
    """Final hidden states that make the embedding: the last token, the mean of all
    tokens, or the first token (`cls`).
    """
    normalise: bool = False
    """Whether to scale the embedding to length 1."""

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
    """The scheduler serves lower numbers first. Waiting requests rise by one level for
    each `STEPS_PER_PRIORITY` steps.
    """
    timeout: float | None = None
    """Seconds after submission at which the request ends with its output so far; None: never."""
    cache_salt: str | None = None
    """Only requests with the same salt share KV in the prefix cache."""
    adapter: str | None = None
    """Name of the loaded LoRA adapter to run with; None: the model without an adapter."""

    def checked(self) -> "RequestOptions":
        """Return the options as plain ints, floats and strings.

        Raises RequestError, which names the field, for a value of a wrong type or out
        of range. The engine knows whether the adapter is loaded, so `Engine.check`
        checks that field.
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
    """Tokens that another engine already generated, for each continuation. The engine
    continues after them and reports only new tokens. Empty: a fresh request.
    """
