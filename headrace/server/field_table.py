"""The table of all fields of all APIs: what is served, ignored or refused, and why."""

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from headrace.server import anthropic_records, openai_records, responses_records
from headrace.server import field_rows as rows
from headrace.server.errors import ApiError

RECORDS: dict[str, type[msgspec.Struct]] = {
    rows.CHAT: openai_records.ChatRequest,
    rows.TEXT: openai_records.CompletionRequest,
    rows.RESPONSES: responses_records.ResponsesRequest,
    rows.MESSAGES: anthropic_records.MessagesRequest,
    rows.COUNT: anthropic_records.CountTokensRequest,
    rows.EMBEDDINGS: openai_records.EmbeddingRequest,
    rows.TOKENIZE: openai_records.TokenizeRequest,
    rows.DETOKENIZE: openai_records.DetokenizeRequest,
}
"""The record of each API's bodies."""
REPLAYED = ("messages", "input", "system")
"""Fields with a conversation. Its parts are read as they come, so the table leaves them out."""
PROMPTS = ("prompt", "messages", "input")
"""Fields with what a request asks. Each API has one of them."""
_APIS = {record: api for api, record in RECORDS.items()}


class Row(NamedTuple):
    path: str
    """Name of a field; `.` precedes a field of an object, and `[]` follows a list."""
    status: Literal["served", "ignored", "refused"]
    reason: str = ""


@cache
def table(api: str) -> tuple[Row, ...]:
    """The rows of an API, by status and name."""
    served = [
        *_served(RECORDS[api]),
        *(path for apis, paths in rows.SERVED if api in apis for path in paths),
    ]
    ignored, refused = _reasons(rows.IGNORED, api), _reasons(rows.REFUSED, api)
    known = {*map(_first_name, [*served, *(path for path, _ in ignored + refused)])}
    foreign = [pair for pair in _fields_of_other_apis(api) if pair[0] not in known]
    return (
        *(Row(path, "served") for path in sorted(served)),
        *(Row(path, "ignored", reason) for path, reason in ignored),
        *(Row(path, "refused", reason) for path, reason in sorted(refused + foreign)),
    )


def _fields_of_other_apis(api: str) -> list[tuple[str, str]]:
    """Fields that other APIs which generate text serve, with why this API refuses them.

    A client that sends one to the wrong route would get another answer than it asked for.
    """
    found: dict[str, str] = {}
    for other in rows.GENERATING if api in rows.GENERATING else ():
        for field in msgspec.structs.fields(RECORDS[other]):
            name = field.encode_name
            reason = rows.COUNTERPARTS[api].get(name, f"it is a field of {other}")
            if name not in PROMPTS:
                found.setdefault(name, reason)
    return list(found.items())


def _reasons(groups: list[rows.Group], api: str) -> list[tuple[str, str]]:
    return sorted(pair for apis, reasons in groups if api in apis for pair in reasons.items())


def _served(record: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(record):
        path = prefix + field.encode_name
        yield path
        if path not in REPLAYED:
            for inner, suffix in _records_in(field.type):
                yield from _served(inner, f"{path}{suffix}.")


def _records_in(kind: Any, suffix: str = "") -> Iterator[tuple[type[msgspec.Struct], str]]:
    """Yield the records in a type, with `[]` if they are in a list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, suffix
    is_list = get_origin(kind) is list
    arguments = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    for argument in arguments:
        if argument is not NoneType:
            yield from _records_in(argument, "[]" if is_list else suffix)


def refuse_unserved(body: bytes, record: type[Any]) -> None:
    """Raise ApiError for a field of a JSON body that the table refuses."""
    if record not in _APIS:
        return
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, refusals in _refusals(_APIS[record]).items():
        if name in given:
            value = msgspec.json.decode(given[name])
            for row in refusals:
                if any(_asks(row.path, found) for found in _values({name: value}, row.path)):
                    raise ApiError(
                        400,
                        "unsupported_parameter",
                        f"{row.path.replace('[]', '')} is not supported: {row.reason}",
                        param=name,
                    )


@cache
def _refusals(api: str) -> dict[str, list[Row]]:
    """Refused rows by the first name of their path."""
    found: dict[str, list[Row]] = {}
    for row in table(api):
        if row.status == "refused":
            found.setdefault(_first_name(row.path), []).append(row)
    return found


def _first_name(path: str) -> str:
    return path.partition(".")[0].removesuffix("[]")


def _values(value: Any, path: str) -> Iterator[Any]:
    """Yield the values at a path."""
    name, _, rest = path.partition(".")
    inner = value.get(name.removesuffix("[]")) if isinstance(value, dict) else None
    for item in inner if name.endswith("[]") and isinstance(inner, list) else [inner]:
        if rest:
            yield from _values(item, rest)
        else:
            yield item


def _asks(path: str, value: Any) -> bool:
    """Return whether a value asks for something that the server does not do anyway."""
    if value is None or value in rows.NEUTRAL.get(path, ()):
        return False
    return bool(value) or path in rows.MEANT
