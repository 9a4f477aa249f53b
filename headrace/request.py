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
class PathOptions:
    """Options of a request whose prompt is a path of a session
    (docs/use/sessions.md).
    """

    keep: Sequence[str] = ()
    """Names under which the engine keeps the KV of the outputs, one for each; of the prompt, with
    `score_from`. Empty: it keeps nothing.
    """
    seeds: Sequence[int] = ()
    """Seed of each output. Output i has the tokens of a request of its own with seed i. Empty: one
    seed for all, as without a session.
    """
    score_from: int | None = None
    """Index of the first prompt token whose log-probability is read. The request then generates
    nothing, and computes all prompt tokens except the last. None: it generates.
    """

    def checked(self, num_prompt_tokens: int, num_outputs: int) -> "PathOptions":
        """Return the options as plain tuples. Raises RequestError, which names the field."""
        keep, seeds = tuple(self.keep), tuple(self.seeds)
        if not all(isinstance(name, str) and name for name in keep):
            raise RequestError("path.keep must be names, each a text that is not empty")
        if len(keep) not in (0, num_outputs):
            raise RequestError(
                f"path.keep has {len(keep)} names for {num_outputs} outputs; give one for each"
            )
        if len(seeds) not in (0, num_outputs):
            raise RequestError(
                f"path.seeds has {len(seeds)} seeds for {num_outputs} outputs; give one for each"
            )
        score_from = self.score_from
        if score_from is not None:
            if num_prompt_tokens < 2:
                raise RequestError("path.score_from needs a prompt of at least 2 tokens")
            score_from = integer("path.score_from", score_from, 1, num_prompt_tokens)
        return PathOptions(
            keep=keep,
            seeds=tuple(integer("path.seeds", seed, 0, 2**64 - 1) for seed in seeds),
            score_from=score_from,
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
    path: PathOptions | None = None
    """Set for a request of a session."""

    def checked(self) -> "RequestOptions":
        """Return the options as plain ints, floats and strings.

        Raises RequestError, which names the field, for a value of a wrong type or out
        of range. The engine knows whether the adapter is loaded, and how long the prompt
        is, so `Engine.check` checks `adapter` and `path`.
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
            path=self.path,
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
