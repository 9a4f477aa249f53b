"""Random JSON schemas with short values: nested records, lists, enums, $ref, anyOf, patterns,
formats and bounds.
"""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

_NAMES = (
    "name size colour place date parts owner state code price weight notes kind level owners "
    "route unit"
).split()
_WORDS = ("red", "green", "blue", "north", "south", "open", "closed", "naïve", "日本", 'a "b"')
_PATTERNS = (
    "^[A-Z]{2}-[0-9]{3}$",
    "^(mon|tues|fri)day$",
    "^[a-f0-9]{4,8}$",
    r"^\d{1,3}(\.\d{1,2})?$",
    "^x*y+z?$",
    '^[^aeiou"\\\\]{3}$',
)
_FORMATS: tuple[Schema, ...] = (
    {"format": "date"},
    {"format": "time", "maxLength": 15},
    {"format": "ipv4"},
    {"format": "uuid"},
    {"format": "email", "maxLength": 20},
)
_CHECKER = FormatChecker(("ipv4", "uuid", "email"))
"""Formats are annotations; the grammar of a date allows 29 February in every year."""
_MAX_DEPTH = 3


def schema_of(seed: int) -> Schema:
    """A schema of a record, the same for the same seed."""
    maker = _Maker(random.Random(seed))
    schema = maker.record(0)
    return schema | ({"$defs": maker.definitions} if maker.definitions else {})


def fault(answer: str, schema: Schema) -> str | None:
    """The error of an answer; None if it is valid."""
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = Draft202012Validator(schema, format_checker=_CHECKER).iter_errors(value)
    return next((error.message for error in errors), None)


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.definitions: dict[str, Schema] = {}
        self._rng = rng

    def record(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randint(2, 4) - (depth > 1))
        required = [name for name in names if self._rng.random() < 0.7] or names[:1]
        properties = {name: self.value(depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def value(self, depth: int) -> Schema:
        kinds = [self._text, self._matching, self._number, self._enum, self._simple]
        if depth < _MAX_DEPTH:
            kinds += [self.record, self._items, self._any_of, self._reference]
        make = self._rng.choice(kinds)
        return make(depth)

    def _text(self, depth: int) -> Schema:
        minimum = self._rng.randint(0, 3)
        return {
            "type": "string",
            "minLength": minimum,
            "maxLength": minimum + self._rng.randint(1, 12),
        }

    def _matching(self, depth: int) -> Schema:
        if self._rng.random() < 0.3:
            return {"type": "string"} | self._rng.choice(_FORMATS)
        pattern = self._rng.choice(_PATTERNS)
        return {"type": "string", "pattern": pattern} | ({"maxLength": 8} if "*" in pattern else {})

    def _number(self, depth: int) -> Schema:
        minimum = self._rng.randint(-1000, 1000)
        if self._rng.random() < 0.3:
            return {
                "type": "number",
                "minimum": minimum,
                "exclusiveMaximum": minimum + 50,
                "multipleOf": self._rng.choice((0.25, 0.5)),
            }
        bounds = {
            "minimum": minimum,
            self._rng.choice(("maximum", "exclusiveMaximum")): minimum + self._rng.randint(1, 5000),
        }
        return {"type": "integer"} | bounds

    def _enum(self, depth: int) -> Schema:
        values = [*self._rng.sample(_WORDS, 3), self._rng.randint(-5, 99), None, True]
        return (
            {"enum": self._rng.sample(values, self._rng.randint(2, 5))}
            if self._rng.random() < 0.8
            else {"const": values[0]}
        )

    def _simple(self, depth: int) -> Schema:
        return {"type": self._rng.choice(("boolean", "null", ["boolean", "null"]))}

    def _items(self, depth: int) -> Schema:
        minimum = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth + 1),
            "minItems": minimum,
            "maxItems": minimum + self._rng.randint(1, 2),
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth + 1) for _ in range(self._rng.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        """Definitions contain no references, since recursion would not end."""
        name = f"d{self._rng.randint(0, 2)}"
        if name not in self.definitions:
            self.definitions[name] = (
                self.record(_MAX_DEPTH - 1) if self._rng.random() < 0.5 else self.value(_MAX_DEPTH)
            )
        return {"$ref": f"#/$defs/{name}"}
