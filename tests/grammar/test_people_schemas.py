"""Schemas as libraries write them: outputs are valid, or the schema is refused by name."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.grammar.grammars import Grammars
from headrace.json_schema import enforceable
from headrace.structured_outputs import StructuredOutputs

LETTERS = [chr(code) for code in range(0x20, 0x7F)]


class Letters:
    """A vocabulary of single characters."""

    special_ids = ()

    def token_bytes(self, token_id: int) -> bytes:
        return LETTERS[token_id].encode()

    def encode(self, text: str, add_special: bool, parse_special: bool = False) -> list[int]:
        return [LETTERS.index(letter) for letter in text if letter in LETTERS]


GRAMMARS = Grammars(Letters(), len(LETTERS))


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


TEXT = {"type": "string"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
CAT = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = {"properties": {"kind": {"const": "dog"}, "name": TEXT}}
PET = {"type": "object", "required": ["kind"], "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    # pydantic 2.14, model_json_schema()
    "Path": record(a=TEXT | {"format": "path"}),
    "SecretStr": record(a=TEXT | {"format": "password", "writeOnly": True}),
    "bytes": record(a=TEXT | {"format": "binary"}),
    "Pattern": record(a=TEXT | {"format": "regex"}),
    "AnyUrl": record(a=TEXT | {"format": "uri", "minLength": 1}),
    "uri-reference": record(a=TEXT | {"format": "uri-reference"}),
    "Decimal": record(a={"anyOf": [{"type": "number"}, TEXT | {"pattern": DECIMAL}]}),
    "Decimal text": record(a=TEXT | {"pattern": DECIMAL}),
    "UUID": record(a=TEXT | {"format": "uuid"}),
    "datetime": record(a=TEXT | {"format": "date-time"}, b=TEXT | {"format": "time"}),
    "timedelta": record(a=TEXT | {"format": "duration"}),
    "IPv4Address": record(a=TEXT | {"format": "ipv4"}, b=TEXT | {"format": "ipvanyaddress"}),
    "Enum": record(a={"$ref": "#/$defs/E"}) | {"$defs": {"E": TEXT | {"enum": ["x", "y"]}}},
    "Literal": record(a={"enum": ["x", 1, None]}, b={"const": "z", "type": "string"}),
    "tuple": record(
        a={
            "type": "array",
            "prefixItems": [{"type": "integer"}, TEXT],
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    "dict of Literal": record(
        a={
            "type": "object",
            "propertyNames": {"enum": ["x", "y"]},
            "additionalProperties": {"type": "integer"},
        }
    ),
    "dict of pattern": record(
        a={
            "type": "object",
            "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}},
            "additionalProperties": False,
        }
    ),
    "bounds": record(
        a={"type": "integer", "exclusiveMinimum": 0, "multipleOf": 5},
        b={"type": "number", "minimum": -0.5, "maximum": 0.5},
        c={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    ),
    "discriminated union": {
        **record(a={"discriminator": {"propertyName": "kind"}, "oneOf": [PET | CAT, PET | DOG]}),
    },
    "recursion": {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"next": optional({"$ref": "#/$defs/Node"}), "v": {"type": "null"}},
            }
        },
        "$ref": "#/$defs/Node",
    },
    # Rust's schemars and Go's invopop/jsonschema
    "i64": record(a={"type": "integer", "format": "int64", "minimum": -(2**63)}),
    "u64": record(a={"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1}),
    "all of i64": record(a={"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "f32": record(a={"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}),
    "f64": record(a={"type": "number", "format": "double", "minimum": -1.7e308}),
    "positive f64": record(a={"type": "number", "minimum": 2.2250738585072014e-308}),
    "late i64": record(a={"type": "integer", "minimum": 10**18}),
    "null or i64": record(a={"type": ["integer", "null"], "format": "int64", "minimum": -(2**63)}),
    # zod's toJSONSchema()
    "zod record": record(a={"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}),
    "zod int": record(
        a={"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
    ),
    "zod strict": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **record(a=TEXT | {"format": "cuid"}, b={"type": "array", "items": TEXT}),
        "additionalProperties": False,
        "unevaluatedProperties": False,
    },
    "open list": record(a={"type": "array", "uniqueItems": False, "items": {"type": "null"}}),
    "one of a set": record(a={"type": "array", "uniqueItems": True, "maxItems": 1, "items": TEXT}),
    "names by pattern": record(
        a={"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": TEXT}
    ),
}


def written(outputs: StructuredOutputs, seed: int) -> Any:
    """A random value that the grammar allows; None if it does not end."""
    rng, state, text = random.Random(seed), GRAMMARS.compile(outputs), ""
    for _ in range(600):
        mask = np.zeros(-(-len(LETTERS) // 32), np.uint32)
        state.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(LETTERS)]
        allowed = np.flatnonzero(bits).tolist()
        if state.is_complete and (not allowed or rng.random() < 0.5):
            return json.loads(text)
        # Brackets and quotes end values soon.
        ends = [token for token in allowed if LETTERS[token] in '"}]']
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        state.advance(token)
        text += LETTERS[token]
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_are_valid_by_the_schema_as_it_was_given(name: str) -> None:
    outputs = StructuredOutputs(json=SCHEMAS[name])
    values = [written(outputs, seed) for seed in range(6)]
    values = [value for value in values if value is not None]
    assert values and not outputs.dropped
    for value in values:
        jsonschema.validate(value, SCHEMAS[name])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "set": ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems"),
    "not": ({"not": {"type": "null"}}, "not"),
    "if": ({"if": TEXT, "then": {"minLength": 2}}, "if"),
    "contains": ({"type": "array", "contains": TEXT}, "contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "look-ahead": (TEXT | {"pattern": "^(?=a)"}, "pattern"),
    "word boundary": (TEXT | {"pattern": r"\bfoo\b"}, "pattern"),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "other document": ({"$ref": "https://example.com/schema"}, "$ref"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_grammar_enforces_is_refused_by_name_or_dropped(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema, keyword = REFUSED[name]
    path = f"json.properties.a.items.{keyword}"
    wrapped = record(a={"type": "array", "items": schema})
    with pytest.raises(RequestError) as error:
        StructuredOutputs(json=wrapped)
    assert str(error.value).startswith(path) and "set strict to false" in str(error.value)

    outputs = StructuredOutputs(json=wrapped, strict=False)
    assert list(outputs.dropped) == [path] and path in caplog.text
    assert written(outputs, 0) is not None


OVERLAPPING = record(a={"oneOf": [{"type": "number"}, {"type": "integer"}]})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "json.$ref # is the schema itself"),
        (record(a={"$ref": "#/properties/a"}), "json.properties.a.$ref #/properties/a is the"),
        ({"anyOf": [TEXT, {"$ref": "#"}]}, "json.anyOf[1].$ref # is the schema itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "is the schema itself",
        ),
        (record(a={"type": "integer", "minimum": 10**30}), "json.properties.a.minimum is 1,000,"),
        (record(a=TEXT | {"pattern": "a{,3}"}), "json.properties.a cannot be compiled: regex"),
        (record(a={"type": "array", "items": {"type": "file"}}), "json.properties.a.items cannot"),
        (OVERLAPPING, "json.properties.a.oneOf has schemas that overlap"),
    ],
)
def test_errors_name_the_path(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        GRAMMARS.compile(StructuredOutputs(json=schema))
    assert message in str(error.value)


def test_lenient_schemas_read_one_of_as_any_of() -> None:
    outputs = StructuredOutputs(json=OVERLAPPING, strict=False)
    assert written(outputs, 1) is not None
    assert outputs.dropped == ("json.properties.a.oneOf (read as anyOf)",)


KINDS = [record(kind={"const": name}) for name in ("cat", "dog")]


@pytest.mark.parametrize(
    ("schemas", "is_listed"),
    [
        ([TEXT, {"type": "null"}, {"type": "integer"}], False),
        ([{"const": 1}, {"enum": [2, "a"]}], False),
        (KINDS, False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], False),
        ([TEXT, TEXT | {"maxLength": 3}], True),
        ([{"enum": [1, 2]}, {"const": 2}], True),
        ([KINDS[0], record(b=TEXT)], True),
        ([{"$ref": "#/$defs/a"}, KINDS[0]], True),
        ([TEXT, {}], True),
    ],
)
def test_only_alternatives_that_may_overlap_are_listed(
    schemas: list[dict[str, Any]], is_listed: bool
) -> None:
    schema = record(a={"oneOf": schemas}) | {"$defs": dict(zip("ab", KINDS, strict=True))}
    dropped = enforceable(schema, "json", strict=False).dropped
    assert dropped == (("json.properties.a.oneOf (read as anyOf)",) if is_listed else ())
    assert enforceable(schema, "json").dropped == ()


def test_an_enforceable_schema_is_unchanged() -> None:
    schema = record(a=TEXT, b={"type": "integer", "minimum": 0})
    assert enforceable(schema, "json") == (schema, ())


GBNF = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "text", "allowed"),
    [
        ('root ::= "yes" | "no"', "yes", True),
        ('root ::= "yes" | "no"', "yo", False),
        ('# a list\nroot ::= item+\nitem ::= "-" [a-z]{1,3}', "-ab-c", True),
        (GBNF, "a+1=b", True),
        (GBNF, "a++", False),
    ],
)
def test_gbnf_is_a_grammar(grammar: str, text: str, allowed: bool) -> None:
    state = GRAMMARS.compile(StructuredOutputs(grammar=grammar))
    mask = np.zeros(-(-len(LETTERS) // 32), np.uint32)
    fits = []
    for letter in text:
        token = LETTERS.index(letter)
        state.fill(mask)
        fits.append(bool(mask[token // 32] >> np.uint32(token % 32) & 1))
        if not fits[-1]:
            break
        state.advance(token)
    assert all(fits) == allowed


@pytest.mark.parametrize(
    ("grammar", "message"),
    [('root ::= "a" | (', "not GBNF: Expected"), ('other ::= "a"', "No 'root' rule")],
)
def test_wrong_gbnf(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GRAMMARS.compile(StructuredOutputs(grammar=grammar))
