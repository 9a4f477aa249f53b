"""What a request says of the text that it wants, in the ways of OpenAI and of vLLM, as
`StructuredOutputs`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.server.errors import invalid
from headrace.server.openai_records import Sampling
from headrace.structured_outputs import StructuredOutputs

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structured_outputs(asked: Sampling) -> StructuredOutputs | None:
    """What the text must be; None where it is free. Raises ApiError, which names the field."""
    found: dict[str, StructuredOutputs | None] = {
        "response_format": response_format(asked.response_format, "response_format")
    }
    if asked.structured_outputs is not None:
        given = {
            name: value
            for name, value in msgspec.structs.asdict(asked.structured_outputs).items()
            if value is not None
        }
        found["structured_outputs"] = checked("structured_outputs", **given)
    for old, name in _GUIDED.items():
        if (value := getattr(asked, old)) is not None:
            found[old] = checked(old, **{name: value})
    named = [name for name, value in found.items() if value is not None]
    if len(named) > 1:
        raise invalid(
            f"{' and '.join(named)} both say what the text must be: give one of them", named[1]
        )
    return found[named[0]] if named else None


def response_format(given: Mapping[str, Any] | None, param: str) -> StructuredOutputs | None:
    """OpenAI's `response_format`, or the `text.format` of its Responses, where the schema stands
    beside the type. Raises ApiError.
    """
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return checked(param, json_object=True)
    if kind != "json_schema":
        raise invalid(f"{param}.type must be text, json_object or json_schema", param)
    inner = given.get("json_schema", given)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{param}: json_schema needs a schema, which is an object", param)
    return checked(param, json=schema)


def checked(param: str, **given: Any) -> StructuredOutputs:
    """A `StructuredOutputs` of a field of a request. Raises ApiError."""
    try:
        return StructuredOutputs(**given)
    except RequestError as error:
        raise invalid(f"{param}: {error}", param) from None
