"""What the text of an output must be: the record that asks for it, and the checks that need no
model. Names as in vLLM.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError

MAX_CHARACTERS = 1 << 16
"""Of a schema, a regular expression or a grammar, and of all choices together."""
MAX_DEPTH = 32
"""Of objects and lists in a schema, one inside the other."""
MAX_CHOICES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the output must be: just one of these. Raises RequestError, which names the field, for
    what none of them can be.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON that is valid by this schema, given as a record or as its text; kept as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole, in the syntax of Rust's `regex` without
    look-around and backreferences.
    """
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this context-free grammar, in the dialect of Lark that llguidance reads."""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(
                f"json_object must be true or false, not {reprlib.repr(self.json_object)}"
            )
        given = [
            name
            for name in ("json", "regex", "choice", "grammar")
            if getattr(self, name) is not None
        ]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise RequestError(
                "structured_outputs must have just one of json, json_object, regex, "
                f"choice and grammar; it has {named}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), MAX_CHARACTERS)


def bad_words(value: object) -> list[str] | None:
    """`SamplingParams.bad_words`, checked. Raises RequestError."""
    return (
        None
        if value is None
        else _texts("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    )


def check_text(name: str, value: object, most: int) -> str:
    """A text of 1 to `most` characters that are Unicode. Raises RequestError, which names it."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {reprlib.repr(value)}")
    if not 0 < len(value) <= most:
        raise RequestError(f"{name} has {len(value):,} characters; it must have 1 to {most:,}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode: it has lone surrogates") from None
    return value


def _texts(name: str, value: object, most: int, most_characters: int) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of texts, not {reprlib.repr(value)}")
    if not 0 < len(value) <= most:
        raise RequestError(f"{name} has {len(value):,} texts; it must have 1 to {most:,}")
    return [check_text(name, text, most_characters) for text in value]


def _choices(value: object) -> list[str]:
    choices = list(dict.fromkeys(_texts("choice", value, MAX_CHOICES, MAX_CHARACTERS)))
    if (total := sum(map(len, choices))) > MAX_CHARACTERS:
        raise RequestError(
            f"choice has {total:,} characters in all; it may have {MAX_CHARACTERS:,}"
        )
    return choices


def _schema(value: object) -> str:
    """A schema as the text of a JSON object, whose order of properties is that of the output."""
    try:
        if isinstance(value, Mapping):
            value = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        text = check_text("json", value, MAX_CHARACTERS)
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is too deep" if isinstance(error, RecursionError) else reprlib.repr(str(error))
        raise RequestError(f"json is not a JSON schema: {reason}") from None
    if not isinstance(schema, dict):
        raise RequestError(
            f"json must be a schema, which is a JSON object, not {reprlib.repr(schema)}"
        )
    if _depth(schema) > MAX_DEPTH:
        raise RequestError(f"json is more than {MAX_DEPTH} objects and lists deep")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _depth(value: object) -> int:
    """Objects and lists that are one inside the other, counted up to one more than there may be."""
    level: list[Any] = [value]
    depth = 0
    while depth <= MAX_DEPTH and (level := [one for one in level if isinstance(one, dict | list)]):
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth
