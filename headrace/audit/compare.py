"""Comparisons of two outputs, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.audit.answers import Output

_MAX_SHOWN = 60
"""Characters of a text in a detail."""


class Result(StrEnum):
    """The verdict of a row."""

    EQUAL = "equal"
    DIFFERS = "differs"
    NOT_OFFERED = "not offered"
    FAILED = "failed"
    NOTED = "noted"
    """Information without a verdict."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict, with the place of the first difference."""

    result: Result
    detail: str = ""
    token: int | None = None
    """Number of the first token that differs, from 1."""
    expected: str = ""
    actual: str = ""


def equal(detail: str = "") -> Finding:
    """A finding without a difference."""
    return Finding(result=Result.EQUAL, detail=detail)


def differs(detail: str, *, token: int | None = None) -> Finding:
    """A finding with a difference that `detail` describes."""
    return Finding(result=Result.DIFFERS, detail=detail, token=token)


def not_offered(detail: str) -> Finding:
    """A finding about a feature that the server lacks."""
    return Finding(result=Result.NOT_OFFERED, detail=detail)


def shown(text: str) -> str:
    """A text in quotes, shortened."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def compare_texts(expected: Sequence[Output], actual: Sequence[Output]) -> Finding:
    """Compare tokens, texts and finish reasons of all outputs."""
    if len(expected) != len(actual):
        return differs(f"{len(expected)} and {len(actual)} outputs")
    for one, other in zip(expected, actual, strict=True):
        if found := _text_difference(one, other):
            return found
    return equal()


def compare_scores(expected: Sequence[Output], actual: Sequence[Output]) -> Finding:
    """Compare the log-probabilities of all outputs, to the last bit."""
    pairs = list(zip(expected, actual, strict=False))
    if not all(one.tokens and other.tokens for one, other in pairs):
        return not_offered("no log-probabilities")
    for one, other in pairs:
        if found := _score_difference(one, other):
            return found
    return equal()


def _text_difference(expected: Output, actual: Output) -> Finding | None:
    detail, token = "", None
    if expected.tokens and actual.tokens:
        ours = [one.text for one in expected.tokens]
        theirs = [one.text for one in actual.tokens]
        if ours != theirs:
            at = _first_difference(ours, theirs)
            detail, token = f"{_item(ours, at)} and {_item(theirs, at)}", at + 1
    if not detail and expected.text != actual.text:
        at = _first_difference(expected.text, actual.text)
        detail = f"character {at + 1}: {shown(expected.text[at:])} and {shown(actual.text[at:])}"
    if not detail and expected.finish_reason != actual.finish_reason:
        detail = f"finish_reason {expected.finish_reason!r} and {actual.finish_reason!r}"
    if not detail:
        return None
    return Finding(
        result=Result.DIFFERS,
        detail=detail,
        token=token,
        expected=expected.text,
        actual=actual.text,
    )


def _score_difference(expected: Output, actual: Output) -> Finding | None:
    if expected.tokens == actual.tokens:
        return None
    at = _first_difference(expected.tokens, actual.tokens)
    if at == min(len(expected.tokens), len(actual.tokens)):
        return differs(f"{len(expected.tokens)} and {len(actual.tokens)} tokens", token=at + 1)
    one, other = expected.tokens[at], actual.tokens[at]
    if one.text != other.text:
        return differs(f"{shown(one.text)} and {shown(other.text)}", token=at + 1)
    if one.logprob == other.logprob:
        return differs(f"top_logprobs of {shown(one.text)}", token=at + 1)
    largest = 0.0
    for one, other in zip(expected.tokens[at:], actual.tokens[at:], strict=False):
        if one.text != other.text:
            break
        largest = max(largest, abs(one.logprob - other.logprob))
    return differs(f"largest difference {largest:.2g}", token=at + 1)


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _item(texts: Sequence[str], at: int) -> str:
    return shown(texts[at]) if at < len(texts) else "the end"
