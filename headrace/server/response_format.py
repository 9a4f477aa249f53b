"""Reads the fields that restrict the text of a response."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.errors import RequestError
from headrace.server.errors import invalid
from headrace.server.openai_records import Sampling, SharedSampling, Structured
from headrace.structured_outputs import StructuredOutputs

_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Fields of `structured_outputs` by their names elsewhere."""


def structured_outputs(request: SharedSampling, strict: bool = True) -> StructuredOutputs | None:
    """Return the restriction or None. Raises ApiError, which names the wrong field.

    `strict` is the default of the request's own `strict`.
    """
    by_field = {
        "response_format": response_format(
            request.response_format if isinstance(request, Sampling) else None,
            "response_format",
            "response_format.json_schema.schema",
            strict,
        )
    }
    for field, record in _records(request).items():
        with errors_name(field):
            by_field[field] = StructuredOutputs(
                json=record.json,
                json_object=bool(record.json_object),
                regex=record.regex,
                choice=record.choice,
                grammar=record.grammar,
                structural_tag=record.structural_tag,
                allowed_sequences=record.allowed_sequences,
                strict=strict if record.strict is None else record.strict,
                field=field if field in _OTHER_NAMES else "",
            )
    given = [field for field, restriction in by_field.items() if restriction is not None]
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)} both restrict the text; give only one", given[1])
    return by_field[given[0]] if given else None


def _records(request: SharedSampling) -> dict[str, Structured]:
    records = {}
    if request.structured_outputs is not None:
        records["structured_outputs"] = request.structured_outputs
    for field, name in _OTHER_NAMES.items():
        if value := getattr(request, field, None):
            records[field] = Structured(**{name: value})
    return records


def response_format(
    value: Mapping[str, Any] | None, param: str, schema_field: str, strict: bool
) -> StructuredOutputs | None:
    """Read `response_format` or `text.format`. Raises ApiError, which names `param`."""
    kind = "text" if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    with errors_name(param):
        if kind == "json_object" and not value.get("schema"):
            return StructuredOutputs(json_object=True)
        if kind == "structural_tag":
            place = schema_field.removesuffix(".schema").removesuffix(".json_schema")
            return StructuredOutputs(structural_tag=value, field=place)
        # llama.cpp and other servers take a schema for a JSON object too.
        if kind not in ("json_schema", "json_object"):
            raise RequestError(
                f"{param}.type must be text, json_object, json_schema or structural_tag"
            )
        inner = value.get("json_schema", value)
        if inner is value:
            schema_field = schema_field.replace(".json_schema", "")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise RequestError(f"{param} of type json_schema must have a schema, an object")
        own_strict = inner.get("strict")
        if own_strict is not None and not isinstance(own_strict, bool):
            raise RequestError(f"{param}.strict must be true or false")
        return StructuredOutputs(
            json=schema,
            strict=strict if own_strict is None else own_strict,
            field=schema_field,
        )


@contextmanager
def errors_name(param: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        message = str(error)
        raise invalid(
            message if message.startswith(param) else f"{param}: {message}", param
        ) from None
