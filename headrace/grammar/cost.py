"""Refuses grammars for which llguidance would take long.

Its time is quadratic in the optional members of an object, cubic in the optional parts of an
expression, and exponential in expressions to match at once.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import reduce
from typing import Any

from headrace.errors import RequestError

_MAX_REPETITIONS = 10_000
_MAX_OPTIONAL = 200
"""Parts of an expression; of a schema, the root of the sum of their squares."""
_MAX_PARTS = 1000
"""Records and booleans in a schema, plus required names without a schema."""
_MAX_MULTIPLE = 10_000
_MAX_INTERSECTED = 6
_EXPRESSION = re.compile(
    r"\\."  # an escaped character
    r"|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)"  # a class
    r"|(?P<open>\((?:\?(?:P?<\w+>|[\w-]*:?))?)"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<count>\{\s*(?P<min>\d+)\s*(?:,\s*(?P<max>\d+)?\s*)?\}\??)"
    r"|(?P<optional>[?*]\??)"
    r"|\+\??|[^\\[(|?*+{]",
    re.DOTALL,
)


def check_cost(field: str, text: str, name: str = "") -> None:
    """Raise RequestError, which begins with `name` or the field, for an expensive text."""
    match field:
        case "regex" | "grammar":
            _check_expressions(name or field, [text])
        case "json":
            _check_schema(name or field, json.loads(text))


def _check_schema(field: str, schema: dict[str, Any]) -> None:
    nodes = list(_nodes(schema))
    objects = [node for node in nodes if isinstance(node, dict)]
    parts = len(nodes) + sum(_num_required(node) for node in objects)
    if parts > _MAX_PARTS:
        raise RequestError(
            f"{field} has {parts:,} records, booleans and required names without a schema; "
            f"the maximum is {_MAX_PARTS:,}"
        )
    multiple = _common_multiple(
        {node["multipleOf"] for node in objects if _is_number(node.get("multipleOf"))}
    )
    if multiple > _MAX_MULTIPLE:
        raise RequestError(
            f"{field} has values of multipleOf whose least common multiple has more than "
            f"{_MAX_MULTIPLE:,} steps; use fewer or rounder values"
        )
    patterns = [node["pattern"] for node in objects if isinstance(node.get("pattern"), str)]
    patterns += [
        name
        for node in objects
        if isinstance(found := node.get("patternProperties"), dict)
        for name in found
    ]
    formats = sum(isinstance(node.get("format"), str) for node in objects)
    intersected = min(len(patterns) + formats, sum(map(_num_intersected, objects)))
    if intersected > _MAX_INTERSECTED:
        raise RequestError(
            f"{field} combines {intersected:,} patterns and formats by allOf and $ref; "
            f"the maximum is {_MAX_INTERSECTED}"
        )
    _check_expressions(field, patterns)


def _nodes(schema: object) -> Iterator[dict[str, Any] | bool]:
    level = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict | bool))
        level = [child for value in level for child in _children(value)]


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _num_required(node: dict[str, Any]) -> int:
    required, properties = node.get("required"), node.get("properties")
    if not isinstance(required, list):
        return 0
    known = properties if isinstance(properties, dict) else {}
    return sum(isinstance(name, str) and name not in known for name in required)


def _num_intersected(node: dict[str, Any]) -> int:
    is_combined = "$ref" in node or "allOf" in node
    num_own = sum(name in node for name in ("pattern", "format")) if is_combined else 0
    num_listed = len(node["allOf"]) - 1 if isinstance(node.get("allOf"), list) else 0
    return num_listed + num_own


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def _common_multiple(values: set[int | float]) -> int:
    """The least common multiple in units of its last decimal."""
    if not values:
        return 0
    multiple = reduce(_least_multiple, (Fraction(str(value)) for value in values))
    while multiple.denominator > 1:
        multiple *= 10
    return multiple.numerator


def _least_multiple(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))


def _check_expressions(field: str, texts: list[str]) -> None:
    squares = 0
    for text in texts:
        repetitions, optional = expression_size(text)
        if repetitions > _MAX_REPETITIONS:
            raise RequestError(
                f"{field} repeats something {repetitions:,} times; the maximum is "
                f"{_MAX_REPETITIONS:,}"
            )
        squares += optional**2
    if squares > _MAX_OPTIONAL**2:
        raise RequestError(
            f"{field} has {math.isqrt(squares):,} optional parts (?, *, {{0,n}}); the maximum is "
            f"{_MAX_OPTIONAL}"
        )


def expression_size(text: str) -> tuple[int, int]:
    """The largest repetition count of an expression and its number of optional parts.

    Nested minimum counts multiply. The optional parts of a group count once per repetition.
    """
    max_repetitions = 1
    # Repetitions and optional parts of each open group, and of the last atom.
    groups, atom = [[1, 0]], [1, 0]
    is_empty = True  # whether the current alternative has no atom yet
    for match in _EXPRESSION.finditer(text):
        kind = match.lastgroup
        if kind == "close":
            atom = groups.pop() if len(groups) > 1 else [1, 0]
            atom[1] += is_empty
        elif kind == "count":
            low, high = int(match["min"]), int(match["max"] or 0)
            max_repetitions = max(max_repetitions, high)
            atom = [atom[0] * low, atom[1] * (max(low, high) - 1) + (not low)]
        elif kind == "optional":
            atom = [1, 1]
        else:
            atom = [1, int(kind == "bar" and is_empty)]
        max_repetitions = max(max_repetitions, atom[0])
        if kind == "open":
            groups.append([1, 0])
        else:
            repetitions, num_optional = groups[-1]
            groups[-1] = [max(repetitions, atom[0]), num_optional + atom[1]]
        is_empty = kind in ("open", "bar")
    return max_repetitions, sum(num_optional for _, num_optional in groups)
