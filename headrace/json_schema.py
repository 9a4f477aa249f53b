"""JSON schemas as people send them: what a grammar enforces of them, and what it cannot.

`enforceable` removes notes, which forbid nothing; brings bounds into the range of grammars; and
refuses or drops keywords that no grammar can enforce.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import RequestError

if TYPE_CHECKING:
    from logging import Logger

_FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split()
)
"""Formats that become patterns; others forbid nothing, by the JSON Schema standard."""
_noted_formats: set[str] = set()
_MAX_NOTED = 256
_MAX_SHOWN = 2000
_MAX_CHAIN = 100

_LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options of llguidance: unknown keywords forbid nothing, and oneOf is read as anyOf."""
_MAX_INTEGER = 2**63 - 1024
"""The largest double below 2^63; grammars of integers end there."""
_MAX_NUMBER = 10**18
_MIN_NUMBER = 1e-15
"""Smaller bounds would need a grammar with too many digits."""

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")
_COMBINED = (*_ALTERNATIVES, "$ref", "if", "dependentSchemas", "patternProperties")

_LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\((?=\?<?[=!])|\\(?=[bB1-9k]))")
"""Look-around, word boundaries and backreferences, which regular languages do not have."""
_REWRITTEN = {
    # Decimal of pydantic: at least one digit.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}


class Enforceable(NamedTuple):
    schema: dict[str, Any]
    dropped: tuple[str, ...]
    """Paths of keywords that the schema no longer has."""


def enforceable(schema: Mapping[str, Any], field: str, *, strict: bool = True) -> Enforceable:
    """Return what a grammar can enforce of a schema.

    Raises RequestError, which names the path from `field` on, for a reference that never ends, and
    if `strict` for a keyword that no grammar enforces; else it drops the keyword.
    """
    _check_references(schema, field)
    reader = _Reader(strict, schema)
    result = reader.read(schema, field)
    if not strict:
        own = result.get("x-guidance")
        result["x-guidance"] = _LENIENT | (dict(own) if isinstance(own, Mapping) else {})
    return Enforceable(result, tuple(reader.dropped))


def shown_paths(paths: Iterable[str]) -> str:
    """Paths for a header, in ASCII."""
    text = ", ".join(paths)
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:_MAX_SHOWN]


def subschemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly in a schema, by path."""
    for name in _MAPS:
        if isinstance(found := schema.get(name), Mapping):
            for key, value in found.items():
                if isinstance(value, Mapping):
                    yield f"{path}.{name}.{_shown(key)}", value
    for name in _LISTS:
        if isinstance(found := schema.get(name), list):
            for i, value in enumerate(found):
                if isinstance(value, Mapping):
                    yield f"{path}.{name}[{i}]", value
    for name in _SINGLE:
        if isinstance(found := schema.get(name), Mapping):
            yield f"{path}.{name}", found


class _Reader:
    def __init__(self, strict: bool, root: Mapping[str, Any]) -> None:
        self._strict, self._root = strict, root
        self.dropped: list[str] = []

    def read(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """A copy of a schema without what no grammar enforces."""
        result = _with_property_names(dict(schema))
        for name in [*result]:
            if (is_trivial := _UNENFORCED.get(name)) and name in result:
                if not is_trivial(result):
                    self._drop(path, name)
                del result[name]
        self._read_text(result, path)
        if not self._strict and self._may_overlap(result.get("oneOf")):
            self.dropped.append(f"{path}.oneOf (read as anyOf)")
        _clamp(result, path)

        for name in _MAPS:
            if isinstance(found := result.get(name), Mapping):
                result[name] = {
                    key: self._value(value, f"{path}.{name}.{_shown(key)}")
                    for key, value in found.items()
                }
        for name in _LISTS:
            if isinstance(found := result.get(name), list):
                result[name] = [
                    self._value(value, f"{path}.{name}[{i}]") for i, value in enumerate(found)
                ]
        for name in _SINGLE:
            if isinstance(found := result.get(name), Mapping):
                result[name] = self._value(found, f"{path}.{name}")
        return result

    def _value(self, value: Any, path: str) -> Any:
        return self.read(value, path) if isinstance(value, Mapping) else value

    def _may_overlap(self, schemas: Any) -> bool:
        """Whether a value may match several of these schemas, as far as types and constants say."""
        if not isinstance(schemas, list):
            return False
        found = [self._resolved(schema) for schema in schemas]
        return not all(_are_apart(a, b) for a, b in combinations(found, 2))

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_CHAIN):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            target = _resolve(self._root, reference) if isinstance(reference, str) else None
            if target is None:
                break
            schema = target
        return schema if isinstance(schema, Mapping) else {}

    def _read_text(self, result: dict[str, Any], path: str) -> None:
        form = result.get("format")
        if isinstance(form, str) and form not in _FORMATS:
            del result["format"]
            _note_format(form, path)
        pattern = result.get("pattern")
        if isinstance(pattern, str):
            result["pattern"] = pattern = _REWRITTEN.get(pattern, pattern)
            if _LOOKS.search(pattern):
                self._drop(path, "pattern", "has look-around, \\b or a backreference, which")
                del result["pattern"]
        reference = result.get("$ref")
        if isinstance(reference, str) and re.match(r"[a-z]+://", reference):
            self._drop(path, "$ref", "names another document, which")
            del result["$ref"]

    def _drop(self, path: str, keyword: str, why: str = "") -> None:
        if self._strict:
            raise RequestError(
                f"{path}.{keyword} {why + ' ' if why else ''}cannot be enforced; leave it out, or "
                "set strict to false to drop what cannot be enforced"
            )
        self.dropped.append(f"{path}.{keyword}")


def _are_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether types, constants, or constants of a required property tell two schemas apart."""
    types = [_types(schema) for schema in (a, b)]
    if all(types) and types[0].isdisjoint(types[1]):
        return True
    constants = [_constants(schema) for schema in (a, b)]
    if all(constants) and set(constants[0]).isdisjoint(constants[1]):
        return True
    for name in set(_required(a)) & set(_required(b)):
        values = [_constants(schema["properties"][name]) for schema in (a, b)]
        if all(values) and set(values[0]).isdisjoint(values[1]):
            return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema, with `number` for an integer; empty if it has any type."""
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in listed if kind is not None}


def _constants(schema: Any) -> list[str]:
    """The only values of a schema, as JSON."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [json.dumps(value, sort_keys=True) for value in values] if values else []


def _required(schema: Mapping[str, Any]) -> list[str]:
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return []
    return [name for name in names if isinstance(name, str) and name in properties]


def _empty(name: str, *values: Any) -> Callable[[Mapping[str, Any]], bool]:
    """Whether the keyword `name` has one of `values`, which forbid nothing."""
    return lambda schema: any(
        type(schema[name]) is type(value) and schema[name] == value for value in values
    )


def _lacks(*others: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda schema: not any(other in schema for other in others)


_UNENFORCED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "$dynamicRef": lambda schema: False,
    "$recursiveRef": lambda schema: False,
    "contains": _empty("contains"),
    "dependencies": _empty("dependencies", {}),
    "dependentRequired": _empty("dependentRequired", {}),
    "dependentSchemas": _empty("dependentSchemas", {}),
    "maxContains": _lacks("contains"),
    "minContains": _lacks("contains"),
    "not": _empty("not", False),
    "propertyNames": _empty("propertyNames", {}, True, {"type": "string"}),
    "unevaluatedItems": _empty("unevaluatedItems", True),
    "unevaluatedProperties": _empty("unevaluatedProperties", True),
    "uniqueItems": lambda schema: (
        not schema["uniqueItems"] or schema.get("maxItems") in (0, 1, 0.0, 1.0)
    ),
    # The order matters: `if` is read while its parts are still there.
    "if": lambda schema: not any(schema.get(name) for name in ("then", "else")),
    "then": _lacks("if"),
    "else": _lacks("if"),
}
"""Keywords that no grammar enforces, with the case in which they forbid nothing."""


def _with_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Write `propertyNames` of records (zod, pydantic) as equal keywords that grammars know."""
    names = schema.get("propertyNames")
    values = schema.get("additionalProperties", True)
    is_open = not schema.get("properties") and not schema.get("patternProperties")
    if isinstance(names, Mapping) and is_open and values is not False:
        rest = {key: value for key, value in names.items() if key != "type"}
        schema = {key: value for key, value in schema.items() if key != "propertyNames"}
        pattern, listed = rest.get("pattern"), rest.get("enum")
        if "const" in rest:
            listed = [rest["const"]]
        if rest.keys() == {"pattern"} and isinstance(pattern, str) and not _LOOKS.search(pattern):
            return schema | {"patternProperties": {pattern: values}, "additionalProperties": False}
        if len(rest) == 1 and isinstance(listed, list) and all(isinstance(i, str) for i in listed):
            properties = dict.fromkeys(listed, values)
            return schema | {"properties": properties, "additionalProperties": False}
        schema["propertyNames"] = names
    if schema.get("unevaluatedProperties") is False and not any(k in schema for k in _COMBINED):
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", False)
    return schema


def _note_format(form: str, path: str) -> None:
    if form not in _noted_formats and len(_noted_formats) < _MAX_NOTED:
        _noted_formats.add(form)
        _log().info("%s.format %s is a note, which forbids no text", path, _shown(form))


def log_dropped(paths: Sequence[str]) -> None:
    _log().warning("dropped schema keywords, which no grammar enforces: %s", ", ".join(paths))


def _log() -> "Logger":
    # The import takes a tenth of the time to start.
    import logging

    return logging.getLogger("headrace")


def _clamp(schema: dict[str, Any], path: str) -> None:
    """Bring bounds into the range of grammars, on the side that keeps the output valid."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    limit = _MAX_INTEGER if "integer" in kinds and "number" not in kinds else _MAX_NUMBER
    for name, sign in (("minimum", 1), ("maximum", -1)):
        other = "maximum" if sign > 0 else "minimum"
        for key in (name, f"exclusive{name.capitalize()}"):
            value = schema.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            towards = sign * value  # the bound as a lower one
            if towards > limit:
                raise RequestError(
                    f"{path}.{key} is {value:,}; numbers beyond {limit:,} cannot be enforced; "
                    "use a smaller bound, or a string with a pattern"
                )
            if towards < -limit:
                schema[key] = -sign * limit
            elif 0 < abs(value) < _MIN_NUMBER:
                schema[key] = sign * _MIN_NUMBER if towards > 0 else 0
            elif towards >= _MAX_NUMBER and not {other, f"exclusive{other.capitalize()}"} & {
                *schema
            }:
                schema[other] = sign * limit


def _check_references(schema: Mapping[str, Any], field: str) -> None:
    """Raise RequestError for a schema that is itself, through references and alternatives."""
    done: set[int] = set()
    level = [(field, schema)]
    while level:
        for path, node in level:
            _follow(schema, node, path, [], done)
        level = [child for path, node in level for child in subschemas(node, path)]


def _follow(
    root: Mapping[str, Any],
    node: Mapping[str, Any],
    path: str,
    open_nodes: list[int],
    done: set[int],
) -> None:
    """Follow the references and alternatives of `node`, at `path`, below `open_nodes`."""
    if id(node) in open_nodes:
        raise RequestError(
            f"{path} is the schema itself, so it never ends; refer to it below a property or item"
        )
    if id(node) in done:
        return
    if len(open_nodes) >= _MAX_CHAIN:
        raise RequestError(
            f"{path[:200]} is a chain of more than {_MAX_CHAIN} references; refer to its end "
            "directly"
        )
    open_nodes = [*open_nodes, id(node)]
    if isinstance(reference := node.get("$ref"), str):
        target = _resolve(root, reference)
        if target is not None:
            _follow(root, target, f"{path}.$ref {_shown(reference)}", open_nodes, done)
    for name in _ALTERNATIVES:
        if isinstance(found := node.get(name), list):
            for i, value in enumerate(found):
                if isinstance(value, Mapping):
                    _follow(root, value, f"{path}.{name}[{i}]", open_nodes, done)
    done.add(id(node))


def _resolve(root: Mapping[str, Any], reference: str) -> Mapping[str, Any] | None:
    """The schema of a JSON pointer; None if there is none, or for another kind of reference."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, Mapping) else None


def _shown(text: object) -> str:
    return str(text)[:60]
