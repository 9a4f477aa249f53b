"""Schemathesis cases from `/openapi.json`: each route and field in turn, valid and invalid.

A request with all fields would nearly always be refused and takes a second to generate. So a case
has the required fields, the field whose turn it is, and up to two more, of bounded sizes.
"""

import random
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import Case, GenerationMode

_MAX = {
    "n": 3,
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "max_output_tokens": 8,
    "min_tokens": 4,
    "maxLength": 24,
    "maxItems": 3,
}
_MAX_TOKEN_ID = 300
"""A little above the vocabulary of the tiny model."""
_ALWAYS = {"stream"}
"""Fields that any case may have: with `stream`, all fields are used in a second way."""
_MODES = [*3 * [GenerationMode.POSITIVE], GenerationMode.NEGATIVE]
_REFERENCE = "#/components/schemas/"


class Description:
    """The server's OpenAPI document."""

    def __init__(self, document: dict[str, Any], model: str) -> None:
        self.document = document
        schemas = document["components"]["schemas"]
        self._schemas = {
            name: schema if name.endswith("Error") else _bounded(schema, model)
            for name, schema in schemas.items()
        }

    def record_of(self, path: str) -> str | None:
        """Return the name of the schema of a path's bodies, or None."""
        body = self.document["paths"][path].get("post", {}).get("requestBody")
        return body and str(body["content"]["application/json"]["schema"]["$ref"]).removeprefix(
            _REFERENCE
        )

    def allows(self, path: str, body: object) -> bool:
        return Draft202012Validator(
            {"$ref": _REFERENCE + (self.record_of(path) or ""), **self.document}
        ).is_valid(body)

    def fields(self) -> dict[str, list[str]]:
        """Return all fields of the bodies of each path."""
        records = {path: self.record_of(path) for path in self.document["paths"]}
        return {
            path: sorted(self._schemas[name]["properties"])
            for path, name in records.items()
            if name
        }

    def cases(self, path: str, seed: int) -> st.SearchStrategy[Case]:
        """Generate cases for each field of a path; `seed` chooses the other fields.

        They take a megabyte per field.
        """
        chooser = random.Random(seed)
        return st.one_of(
            [
                case
                for field in self.fields()[path]
                for case in self._cases_with(path, field, chooser)
            ]
        )

    def _cases_with(
        self, path: str, field: str, chooser: random.Random
    ) -> Iterator[st.SearchStrategy[Case]]:
        name = self.record_of(path) or ""
        record = self._schemas[name]
        needed = {*record.get("required", ()), field}
        others = sorted(record["properties"].keys() - needed - _ALWAYS)
        for mode in _MODES:
            company = {*needed, *chooser.sample(others, min(2, len(others)))}
            fields = sorted(company | (_ALWAYS & record["properties"].keys()))
            narrow = record | {
                "properties": {item: _given(record["properties"][item]) for item in fields},
                "required": sorted(company),
            }
            schemas = {"schemas": self._schemas | {name: narrow}}
            operations = schemathesis.openapi.from_dict(
                self.document
                | {"paths": {path: self.document["paths"][path]}, "components": schemas}
            )
            yield operations[path]["POST"].as_strategy(generation_mode=mode)


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that is not null, because null counts as absent."""
    return (
        schema | {"anyOf": [item for item in schema["anyOf"] if item != {"type": "null"}]}
        if "anyOf" in schema
        else schema
    )


def _bounded(schema: Any, model: str, name: str = "") -> Any:
    """Return a schema with small values and the known model; `name` is the property's name."""
    if isinstance(schema, list):
        return [_bounded(item, model, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if name == "model":
        return {"enum": [model, None]}
    schema = {
        key: _bounded(item, model, name) for key, item in schema.items() if key != "properties"
    } | (
        {
            "properties": {
                key: _bounded(item, model, key) for key, item in schema["properties"].items()
            }
        }
        if "properties" in schema
        else {}
    )
    match schema.get("type"):
        case "object":
            schema |= (
                {"additionalProperties": False} if "properties" in schema else {"maxProperties": 2}
            )
        case "array":
            schema["maxItems"] = min(schema.get("maxItems", _MAX["maxItems"]), _MAX["maxItems"])
        case "string" if "enum" not in schema:
            schema["maxLength"] = min(schema.get("maxLength", _MAX["maxLength"]), _MAX["maxLength"])
        case "integer":
            maximum = _MAX.get(
                name, _MAX_TOKEN_ID if "token" in name or name in ("prompt", "input") else 2**63
            )
            schema["maximum"] = min(schema.get("maximum", maximum), maximum)
    if "propertyNames" in schema:
        schema["propertyNames"] = {"pattern": "^[1-9][0-9]?$"}
    return schema


def as_clients_write(value: Any) -> Any:
    """Write whole numbers as integers: JSON Schema takes 2.0 for one, the server does not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_clients_write(item) for item in value]
    return (
        {key: as_clients_write(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
