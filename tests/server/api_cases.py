"""Requests by Schemathesis, of what `/openapi.json` says: each route and field in turn, beside a
few others, as described and otherwise.

A request with all fields at once would be refused for one of them nearly every time, and take a
second to be made: so each case has the fields that it must have, the one whose turn it is and up to
two more, and its sizes are bounded.
"""

import random
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import Case, GenerationMode

_MOST = {
    "n": 3,
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "max_output_tokens": 8,
    "min_tokens": 4,
    "maxLength": 24,
    "maxItems": 3,
}
_MOST_TOKEN_ID = 300
"""A little above the vocabulary of the tiny model."""
_ALWAYS = {"stream"}
"""May be in every case: with it all fields are answered in a second way."""
_MODES = [*3 * [GenerationMode.POSITIVE], GenerationMode.NEGATIVE]
_REFERENCE = "#/components/schemas/"


class Description:
    """A server's own description of what it takes."""

    def __init__(self, document: dict[str, Any], model: str) -> None:
        """`model`: the name that the server knows."""
        self.document = document
        schemas = document["components"]["schemas"]
        self._schemas = {
            name: schema if name.endswith("Error") else _bounded(schema, model)
            for name, schema in schemas.items()
        }

    def record_of(self, path: str) -> str | None:
        """The name of the schema of the bodies that a path takes; None where it takes none."""
        body = self.document["paths"][path].get("post", {}).get("requestBody")
        return body and str(body["content"]["application/json"]["schema"]["$ref"]).removeprefix(
            _REFERENCE
        )

    def allows(self, path: str, body: object) -> bool:
        """Whether a body is as described."""
        return Draft202012Validator(
            {"$ref": _REFERENCE + (self.record_of(path) or ""), **self.document}
        ).is_valid(body)

    def fields(self) -> dict[str, list[str]]:
        """All fields of the bodies that each path takes."""
        records = {path: self.record_of(path) for path in self.document["paths"]}
        return {
            path: sorted(self._schemas[name]["properties"])
            for path, name in records.items()
            if name
        }

    def cases(self, path: str, seed: int) -> st.SearchStrategy[Case]:
        """Cases of each field of the bodies of a path; `seed` decides in what company. They take a
        megabyte for each field.
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
                "properties": {one: _given(record["properties"][one]) for one in fields},
                "required": sorted(company),
            }
            schemas = {"schemas": self._schemas | {name: narrow}}
            operations = schemathesis.openapi.from_dict(
                self.document
                | {"paths": {path: self.document["paths"][path]}, "components": schemas}
            )
            yield operations[path]["POST"].as_strategy(generation_mode=mode)


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that is not null: null would be the same as none."""
    return (
        schema | {"anyOf": [one for one in schema["anyOf"] if one != {"type": "null"}]}
        if "anyOf" in schema
        else schema
    )


def _bounded(schema: Any, model: str, name: str = "") -> Any:
    """A schema under which values are small, and the model is the one that there is. `name`: the
    property that it is of.
    """
    if isinstance(schema, list):
        return [_bounded(one, model, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if name == "model":
        return {"enum": [model, None]}
    schema = {
        key: _bounded(one, model, name) for key, one in schema.items() if key != "properties"
    } | (
        {
            "properties": {
                key: _bounded(one, model, key) for key, one in schema["properties"].items()
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
            schema["maxItems"] = min(schema.get("maxItems", _MOST["maxItems"]), _MOST["maxItems"])
        case "string" if "enum" not in schema:
            schema["maxLength"] = min(
                schema.get("maxLength", _MOST["maxLength"]), _MOST["maxLength"]
            )
        case "integer":
            most = _MOST.get(
                name, _MOST_TOKEN_ID if "token" in name or name in ("prompt", "input") else 2**63
            )
            schema["maximum"] = min(schema.get("maximum", most), most)
    if "propertyNames" in schema:
        schema["propertyNames"] = {"pattern": "^[1-9][0-9]?$"}
    return schema


def as_clients_write(value: Any) -> Any:
    """A value with whole numbers written so: 2.0 is an integer by JSON's schemas, and here it is
    none.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_clients_write(one) for one in value]
    return (
        {key: as_clients_write(one) for key, one in value.items()}
        if isinstance(value, dict)
        else value
    )
