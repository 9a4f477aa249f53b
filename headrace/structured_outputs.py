"""Structured outputs: the record that describes the text of an output, and checks without a model.

The names are the names of vLLM.
"""

import json
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.errors import RequestError
from headrace.json_schema import enforceable, log_dropped
from headrace.validation import are_token_ids, token_ids

MAX_CHARACTERS = 1 << 16
"""Max characters of a schema, regular expression or grammar, or of all choices together."""
MAX_DEPTH = 32
MAX_CHOICES = 1024
MAX_ALLOWED_SEQUENCES = 1 << 18
MAX_SEQUENCE_SIZE = 1024
"""Tokens or characters of one allowed sequence."""
MAX_SEQUENCES_SIZE = 1 << 21
"""Tokens and characters of all allowed sequences."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024


_FIELDS = ("json", "regex", "choice", "grammar", "structural_tag", "allowed_sequences")
"""Fields that restrict the text, apart from `json_object`."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The text that an output must have, by exactly one of these fields.

    Raises RequestError, which names the field, for an invalid value.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON schema, given as a mapping or as text and kept as text."""
    json_object: bool = False
    regex: str | None = None
    r"""Regular expression that matches the entire text, in the syntax of Rust's `regex`.

    `\d`, `\w` and `\s` are ASCII. It has no look-around and no backreferences.
    """
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Context-free grammar of the text: llguidance's dialect of Lark, or GBNF with the rule `root`
    (llama.cpp's, and vLLM's EBNF).
    """
    structural_tag: str | Mapping[str, Any] | None = None
    """Text with tags whose content has a schema, in either form of vLLM and xgrammar, given as a
    mapping or as text and kept as text.
    """
    allowed_sequences: Sequence[str | Sequence[int]] | None = None
    """Token sequences of which the entire output is one, each given as token ids or as a text, of
    which it has the tokenizer's tokens. A sequence that begins another ends with an end token.
    """
    strict: bool = True
    """Whether a keyword of `json` that no grammar enforces (`uniqueItems`, `not`, `if`, look-ahead
    in a pattern) is an error. False: it is dropped, and `dropped` names it.
    """
    dropped: Sequence[str] = ()
    """Paths of the keywords that were dropped from `json`; set by the record."""
    field: str = ""
    """Name of the restricting field in errors; empty: the name of the field here."""
    envelope: str = ""
    """Lark grammar of the whole output, in which `@answer` is the restricted text; empty: that text
    alone. The server sets it if reasoning may precede the text.
    """
    tool_schemas: Sequence[tuple[str, str]] = ()
    """Schemas inside of `grammar`, with their fields, which errors name."""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(
                f"json_object must be true or false, not {reprlib.repr(self.json_object)}"
            )
        if not isinstance(self.strict, bool):
            raise RequestError(f"strict must be true or false, not {reprlib.repr(self.strict)}")
        given = [name for name in _FIELDS if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            named = " and ".join(given) if given else "no field"
            raise RequestError(
                "structured_outputs takes exactly one field: json, json_object, regex, choice, "
                f"grammar, structural_tag or allowed_sequences; it has {named}"
            )
        if self.json is not None:
            text = _schema("json", self.json)
            found = enforceable(json.loads(text), self.field or "json", strict=self.strict)
            if found.dropped:
                object.__setattr__(self, "dropped", found.dropped)
                log_dropped(found.dropped)
            if found.schema != json.loads(text):
                text = json.dumps(found.schema, ensure_ascii=False)
            object.__setattr__(self, "json", text)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.structural_tag is not None:
            tag = _schema("structural_tag", self.structural_tag)
            object.__setattr__(self, "structural_tag", tag)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), MAX_CHARACTERS)
        if self.allowed_sequences is not None:
            if self.envelope:
                raise RequestError(
                    "allowed_sequences restricts an output from its first token, but here reasoning"
                    " or calls of tools may come first; turn reasoning off, leave tools out, or "
                    "use /v1/completions"
                )
            object.__setattr__(self, "allowed_sequences", _sequences(self.allowed_sequences))

    @cached_property
    def digest(self) -> bytes:
        """Hash of the allowed sequences."""
        # The command line imports this file before it needs the parts that a start loads.
        from hashlib import blake2b

        content = blake2b(digest_size=16)
        for item in self.allowed_sequences or ():
            is_text = isinstance(item, str)
            data = item.encode() if isinstance(item, str) else array("i", item).tobytes()
            content.update(b"%d %d " % (is_text, len(data)))
            content.update(data)
        return content.digest()


def bad_words(value: object) -> list[str] | None:
    if value is None:
        return None
    return _texts("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)


def check_text(name: str, value: object, max_characters: int) -> str:
    """Check Unicode text of 1 to `max_characters` characters.

    Raises RequestError, which begins with `name`.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {reprlib.repr(value)}")
    if not 0 < len(value) <= max_characters:
        raise RequestError(
            f"{name} has {len(value):,} characters; it must have 1 to {max_characters:,}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode: it has lone surrogates") from None
    return value


def _texts(name: str, value: object, max_texts: int, max_characters: int) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of texts, not {reprlib.repr(value)}")
    if not 0 < len(value) <= max_texts:
        raise RequestError(f"{name} has {len(value):,} texts; it must have 1 to {max_texts:,}")
    return [check_text(name, text, max_characters) for text in value]


def _choices(value: object) -> list[str]:
    choices = list(dict.fromkeys(_texts("choice", value, MAX_CHOICES, MAX_CHARACTERS)))
    if (total := sum(map(len, choices))) > MAX_CHARACTERS:
        raise RequestError(
            f"choice has {total:,} characters in total; the maximum is {MAX_CHARACTERS:,}"
        )
    return choices


def _sequences(value: object) -> list[str | list[int]]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(
            f"allowed_sequences must be a list of texts or of lists of token ids, not "
            f"{reprlib.repr(value)}"
        )
    if not 0 < len(value) <= MAX_ALLOWED_SEQUENCES:
        raise RequestError(
            f"allowed_sequences has {len(value):,} sequences; it must have 1 to "
            f"{MAX_ALLOWED_SEQUENCES:,}"
        )
    sequences: list[str | list[int]] = []
    for index, item in enumerate(value):
        # The usual case: the checks below would take several times as long.
        if type(item) is list and 0 < len(item) <= MAX_SEQUENCE_SIZE and are_token_ids(item):
            sequences.append(item[:])
            continue
        name = f"allowed_sequences[{index}]"
        if isinstance(item, str):
            sequences.append(check_text(name, item, MAX_SEQUENCE_SIZE))
        elif ids := token_ids(name, item, MAX_SEQUENCE_SIZE):
            sequences.append(ids)
        else:
            raise RequestError(f"{name} is empty; give at least one token, or leave it out")
    if (size := sum(map(len, sequences))) > MAX_SEQUENCES_SIZE:
        raise RequestError(
            f"allowed_sequences has {size:,} tokens and characters in total; the maximum is "
            f"{MAX_SEQUENCES_SIZE:,}"
        )
    return sequences


def _schema(name: str, value: object) -> str:
    """A schema or tag as JSON text; the output has its properties in the same order."""
    try:
        if isinstance(value, Mapping):
            value = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        text = check_text(name, value, MAX_CHARACTERS)
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is too deep" if isinstance(error, RecursionError) else reprlib.repr(str(error))
        kind = "a JSON schema" if name == "json" else "JSON"
        raise RequestError(f"{name} is not {kind}: {reason}") from None
    if not isinstance(schema, dict):
        kind = "a schema, a JSON object" if name == "json" else "a JSON object"
        raise RequestError(f"{name} must be {kind}, not {reprlib.repr(schema)}")
    if _depth(schema) > MAX_DEPTH:
        raise RequestError(f"{name} has more than {MAX_DEPTH} nested objects and lists")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(value: object) -> int:
    level: list[Any] = [value]
    depth = 0
    while depth <= MAX_DEPTH:
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            break
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
        depth += 1
    return depth
