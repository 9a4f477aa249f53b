"""Checks of single values from a caller. Each raises RequestError, which names the field."""

import difflib
import math
import reprlib
from collections.abc import Iterable
from itertools import islice
from numbers import Integral, Real
from operator import length_hint
from typing import Any

from headrace.errors import RequestError

MAX_INTEGER = 2**31 - 1


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise RequestError for the first unknown name, with the most similar known name."""
    known = list(known)
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean {similar[0]}?" if similar else f"choose from: {', '.join(known)}"
            raise RequestError(f"unknown {kind} {reprlib.repr(name)}; {hint}")


def integer(name: str, value: object, min_value: int, max_value: int) -> int:
    """Return the value as an int, if it is a whole number within the bounds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or not min_value <= int(value) <= max_value
    ):
        raise RequestError(
            f"{name} must be a whole number from {min_value:,} to {max_value:,}, not "
            f"{reprlib.repr(value)}"
        )
    return int(value)


def number(name: str, value: object, min_value: float, max_value: float) -> float:
    """Return the value as a float, if it is a number within the bounds."""
    checked = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            checked = float(value)
        except OverflowError:
            checked = math.inf
    if not min_value <= checked <= max_value:  # NaN fails, too
        raise RequestError(
            f"{name} must be a number from {min_value:g} to {max_value:g}, not "
            f"{reprlib.repr(value)}"
        )
    return checked


def token_ids(
    name: str,
    values: object,
    limit: int,
    too_many: str = "{name} has more than {limit:,} entries",
) -> list[int]:
    """Return the values as a list of at most `limit` token ids.

    `too_many` is the message for more values, with `{name}`, `{limit}` and `{count}`.
    If the values have a length, the function checks it before it iterates.
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
        count_text = f"{count:,}" if count > limit else f"more than {limit:,}"
        raise RequestError(too_many.format(name=name, limit=limit, count=count_text))
    # A list of plain ints in range needs no conversion, which takes 50 times as long.
    if are_token_ids(ids):
        return ids
    return [integer(name, token, 0, MAX_INTEGER) for token in ids]


def are_token_ids(values: list[Any]) -> bool:
    """Return whether values, of which there is one at least, are plain ints in range."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INTEGER
