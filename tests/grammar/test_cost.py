"""Grammars that llguidance would compile for seconds are refused by their shape."""

import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.grammar.cost import check_cost, expression_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("ab+", (1, 0)),
        ("a{5}b{4}", (5, 0)),
        ("(a{10}){20}", (200, 0)),
        ("((a{10}b{3}){20}c|d){2}e", (400, 0)),
        (r"[{(]{7}\({3}", (7, 0)),
        ("[]a{9}]{3}", (3, 0)),
        ("a{2,99}", (99, 0)),
        ("(a{6,}){5}", (30, 0)),
        ("((", (1, 0)),
        ("))a{3}", (3, 1)),
        ("[" * 60000, (1, 0)),
        ("(" * 30000 + ")" * 30000, (1, 1)),
        ("a?b*c+", (1, 2)),
        ("(?:a)(?P<x>b?)(?i)c", (1, 2)),
        (r"[?*]a+?\?", (1, 0)),
        ("a??b*?", (1, 2)),
        ("(a|)(|b)(a||b)", (1, 3)),
        ("((a?){3}b?){2}", (6, 8)),
        ("(a?b*){2,4}", (4, 8)),
        ("a{0,5}b{0}", (5, 2)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_expression_size(text: str, size: tuple[int, int]) -> None:
    assert expression_size(text) == size


def properties(count: int, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": schema for i in range(count)}}


def multiples(*values: float) -> dict[str, Any]:
    return {"prefixItems": [{"type": "number", "multipleOf": value} for value in values]}


def intersected(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(count)]}


def chained(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f".*a{i}.*"} for i in range(count)}
    return {
        "$defs": links | {f"d{count}": {"type": "string", "format": "date"}},
        "$ref": "#/$defs/d0",
    }


def optional(patterns: int, each: int) -> dict[str, Any]:
    return {
        "patternProperties": {
            f"^{i}" + "a?" * each: {"type": "string", "pattern": "b*" * each}
            for i in range(patterns // 2)
        }
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (properties(999, True), "1,001 records"),
        (properties(998, {"type": "integer"}), None),
        ({"required": [f"r{i}" for i in range(1000)]}, "1,001 records"),
        (properties(500, {}) | {"required": [f"p{i}" for i in range(500)]}, None),
        ({"description": "a{99999}" + "?" * 5000, "const": 1}, None),
        ({"enum": [str(i) for i in range(5000)]}, None),
        (multiples(1009, 1013), "least common multiple"),
        (multiples(200_003), "least common multiple"),
        (multiples(12.345), "least common multiple"),
        (multiples(5, 10, 100, 0.01, 0.25, 7, 1e-300), None),
        (multiples(5, 10, 25, 0.01, 0.25), None),
        (multiples(1e308), "least common multiple"),
        (
            {
                "multipleOf": "x",
                "allOf": 3,
                "required": 4,
                "properties": 5,
                "patternProperties": 6,
                "pattern": 7,
            },
            None,
        ),
        (intersected(8), "combines 7 patterns"),
        (intersected(7), None),
        (chained(7), "combines 7 patterns"),
        ({"allOf": [{"$ref": "#"}] * 50}, None),
        (optional(8, 100), "282 optional parts"),
        (optional(8, 70), None),
        ({"pattern": "(a{200}){200}"}, "repeats something 40,000 times"),
    ],
)
def test_the_cost_of_schemas_is_limited(schema: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_cost("json", json.dumps(schema))
    else:
        with pytest.raises(RequestError, match=f"^json .*{message}"):
            check_cost("json", json.dumps(schema))


@pytest.mark.parametrize("field", ["regex", "grammar"])
def test_the_cost_of_expressions_is_limited(field: str) -> None:
    check_cost(field, "a?" * 200 + "a" * 5000)
    for text, message in (
        ("a?" * 201, "201 optional parts"),
        ("(a?){1600}", "1,600 optional"),
        ("a{10001}", "10,001 times"),
    ):
        with pytest.raises(RequestError, match=f"^{field} .*{message}"):
            check_cost(field, text)


def test_choices_are_not_expressions() -> None:
    check_cost("choice", json.dumps(["a{99999}" + "?" * 5000]))
    check_cost("json_object", "True")
