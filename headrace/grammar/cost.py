"""What a text would take to compile and to follow, known from its shape: where llguidance's own
limits do not bound it.

It compiles optional members of an object in time quadratic in their number, a multiple as an
automaton of so many states, texts that must match several expressions at once in exponential time,
and follows n optional parts of an expression in time cubic in n.
"""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from typing import Any

from headrace.errors import RequestError

_MOST_REPETITIONS = 10_000
_MOST_OPTIONAL = 200
"""Optional parts of an expression: the root of the sum of squares where a schema has several."""
_MOST_PARTS = 1000
"""Records and booleans in a schema, each of which may be a schema itself, and names that it only
requires.
"""
_MOST_MULTIPLE = 10_000
_MOST_INTERSECTED = 6
_EXPRESSION = re.compile(
    r"\\."  # something escaped
    r"|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)"  # a class
    r"|(?P<open>\((?:\?(?:P?<\w+>|[\w-]*:?))?)"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<count>\{\s*(?P<least>\d+)\s*(?:,\s*(?P<bound>\d+)?\s*)?\}\??)"
    r"|(?P<optional>[?*]\??)"
    r"|\+\??|[^\\[(|?*+{]",
    re.DOTALL,
)


def check_cost(field: str, text: str) -> None:
    """Raise RequestError, which names the field, for a text that would take long."""
    match field:
        case "regex" | "grammar":
            _check_expressions(field, [text])
        case "json":
            _check_schema(field, json.loads(text))


def _check_schema(field: str, schema: dict[str, Any]) -> None:
    nodes = list(_nodes(schema))
    objects = [node for node in nodes if isinstance(node, dict)]
    parts = len(nodes) + sum(_num_required(node) for node in objects)
    if parts > _MOST_PARTS:
        raise RequestError(
            f"{field} has {parts:,} records, booleans and further required names; "
            f"{_MOST_PARTS:,} is the most"
        )
    multiple = _common_multiple(
        {node["multipleOf"] for node in objects if _is_number(node.get("multipleOf"))}
    )
    if multiple > _MOST_MULTIPLE:
        raise RequestError(
            f"{field} has values of multipleOf whose least common multiple has more than "
            f"{_MOST_MULTIPLE:,} steps"
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
    if intersected > _MOST_INTERSECTED:
        raise RequestError(
            f"{field} combines {intersected:,} patterns and formats by allOf and $ref; "
            f"{_MOST_INTERSECTED} is the most"
        )
    _check_expressions(field, patterns)


def _nodes(schema: object) -> Iterator[dict[str, Any] | bool]:
    """Records and booleans in a schema, itself among them: each may be a schema."""
    level = [schema]
    while level:
        yield from (one for one in level if isinstance(one, dict | bool))
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]


def _num_required(node: dict[str, Any]) -> int:
    """Names that a schema requires and says nothing else of."""
    required, properties = node.get("required"), node.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return (
        sum(isinstance(name, str) and name not in known for name in required)
        if isinstance(required, list)
        else 0
    )


def _num_intersected(node: dict[str, Any]) -> int:
    """Schemas that a schema holds beside its first."""
    further = len(node["allOf"]) - 1 if isinstance(node.get("allOf"), list) else 0
    return further + sum(name in node for name in ("pattern", "format")) * (
        "$ref" in node or "allOf" in node
    )


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def _common_multiple(values: set[int | float]) -> int:
    """The least number that all of these divide, in units of its last decimal; 0 for no values."""
    if not values:
        return 0
    found = reduce(_least_multiple, (Fraction(str(value)) for value in values))
    while found.denominator > 1:
        found *= 10
    return found.numerator


def _least_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(
        math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator)
    )


def _check_expressions(field: str, texts: list[str]) -> None:
    squares = 0
    for text in texts:
        repetitions, optional = expression_size(text)
        if repetitions > _MOST_REPETITIONS:
            raise RequestError(
                f"{field} repeats something {repetitions:,} times; {_MOST_REPETITIONS:,} "
                "is the most"
            )
        squares += optional**2
    if squares > _MOST_OPTIONAL**2:
        raise RequestError(
            f"{field} has {math.isqrt(squares):,} optional parts (?, *, {{0,n}}); "
            f"{_MOST_OPTIONAL} is the most"
        )


def expression_size(text: str) -> tuple[int, int]:
    """How often an expression repeats something at least, or the largest of its counts; and its
    optional parts, those of a group as often as the group is repeated.
    """
    most = 1
    groups, atom = (
        [[1, 0]],
        [1, 0],
    )  # repetitions and optional parts in each open group, and in what came last
    is_empty = True  # whether nothing stands between the last parenthesis or bar and here
    for found in _EXPRESSION.finditer(text):
        kind = found.lastgroup
        if kind == "close":
            atom = groups.pop() if len(groups) > 1 else [1, 0]
            atom[1] += is_empty
        elif kind == "count":
            least, bound = int(found["least"]), int(found["bound"] or 0)
            most = max(most, bound)
            atom = [atom[0] * least, atom[1] * (max(least, bound) - 1) + (not least)]
        elif kind == "optional":
            atom = [1, 1]
        else:
            atom = [1, int(kind == "bar" and is_empty)]
        most = max(most, atom[0])
        if kind == "open":
            groups.append([1, 0])
        else:
            groups[-1] = [max(groups[-1][0], atom[0]), groups[-1][1] + atom[1]]
        is_empty = kind in ("open", "bar")
    return most, sum(optional for _, optional in groups)
