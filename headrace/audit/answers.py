"""Answers of a server in one form, whether they came whole or as a stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.audit.bodies import Body, Choice, Logprobs, Usage

NO_LOGPROB = -9999.0
"""Stands for a log-probability that JSON cannot express, as in OpenAI's API."""


@dataclass(frozen=True)
class Token:
    """A token with its log-probability, and the likeliest tokens of its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Output:
    """One text that a server generated."""

    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] = ()
    """Empty if the server gave no log-probabilities."""
    token_ids: tuple[int, ...] = ()
    """Empty if the server gave no token ids."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outputs of one request, with its token counts."""

    outputs: tuple[Output, ...]
    usage: Usage | None
    num_drafted: int | None = None
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def output(self) -> Output:
        """The first output."""
        return self.outputs[0]


def whole_answer(body: Body) -> Answer:
    """Read a response that came whole. Raises ValueError if it has no output."""
    if not body.choices:
        raise ValueError("the response has no choices")
    return Answer(
        outputs=_outputs(body.choices),
        usage=body.usage,
        num_drafted=body.num_drafted,
        prompt_token_ids=tuple(body.prompt_token_ids or body.choices[0].prompt_token_ids or ()),
    )


def streamed_answer(events: Sequence[Body]) -> Answer:
    """Join the events of a stream. Raises ValueError if they have no output."""
    choices = [choice for event in events for choice in event.choices]
    if not choices:
        raise ValueError("the stream has no choices")
    usages = [event.usage for event in events if event.usage]
    drafted = [event.num_drafted for event in events if event.num_drafted is not None]
    return Answer(
        outputs=_outputs(choices),
        usage=usages[-1] if usages else None,
        num_drafted=drafted[-1] if drafted else None,
    )


def scored_tokens(logprobs: Logprobs | None) -> tuple[Token, ...]:
    """Read log-probabilities in either shape. Raises ValueError if the lengths differ."""
    if logprobs is None:
        return ()
    if logprobs.content is not None:
        return tuple(
            Token(
                entry.token,
                _number(entry.logprob),
                tuple((top.token, _number(top.logprob)) for top in entry.top_logprobs or ()),
            )
            for entry in logprobs.content
        )
    tokens, scores = logprobs.tokens or [], logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(tokens)
    if not len(tokens) == len(scores) == len(tops):
        raise ValueError(
            f"logprobs has {len(tokens)} tokens, {len(scores)} token_logprobs and {len(tops)} "
            "top_logprobs"
        )
    return tuple(
        Token(
            token,
            _number(score),
            tuple(_by_score(top or {})),
        )
        for token, score, top in zip(tokens, scores, tops, strict=True)
    )


def _by_score(top: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Sort the tokens of a JSON object, whose order means nothing."""
    entries = [(text, _number(value)) for text, value in top.items()]
    return sorted(entries, key=lambda entry: -entry[1])


def _number(logprob: float | None) -> float:
    return NO_LOGPROB if logprob is None else logprob


def _outputs(choices: Iterable[Choice]) -> tuple[Output, ...]:
    parts: dict[int, list[Choice]] = {}
    for choice in choices:
        parts.setdefault(choice.index, []).append(choice)
    return tuple(_output(parts[index]) for index in sorted(parts))


def _output(parts: Sequence[Choice]) -> Output:
    reasons = [part.finish_reason for part in parts if part.finish_reason]
    return Output(
        text="".join(part.piece for part in parts),
        finish_reason=reasons[-1] if reasons else None,
        tokens=tuple(token for part in parts for token in scored_tokens(part.logprobs)),
        token_ids=tuple(token for part in parts for token in part.token_ids or ()),
    )
