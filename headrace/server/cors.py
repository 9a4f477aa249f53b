"""Cross-origin resource sharing: which web pages of other sites may use the server."""

import json
import re
from collections.abc import Iterable

from headrace.errors import RequestError
from headrace.server.http_exchange import HttpExchange

_ORIGIN = re.compile(r"null|\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)
_EXPOSED = "x-request-id, retry-after, x-should-retry, x-dropped-schema-keywords"
_MAX_AGE = "600"


def read_origins(argument: str) -> tuple[str, ...]:
    """Read a JSON list or a list with commas. Raises RequestError for what is no origin."""
    text = argument.strip()
    try:
        words = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError:
        words = [text]
    origins = tuple(str(word).strip() for word in words)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise RequestError(
                f"--allowed-origins {origin!r} is not an origin; write * or origins such as "
                "http://localhost:3000,https://chat.example"
            )
    return tuple(origin.lower() for origin in origins)


def cors_headers(http: HttpExchange, allowed: Iterable[str]) -> dict[str, str]:
    """Make the response headers that let the request's origin read the response."""
    origin = http.header("origin")
    if origin is None or not allowed:
        return {}
    if "*" in allowed:
        return {"access-control-allow-origin": "*", "access-control-expose-headers": _EXPOSED}
    if origin.lower() not in allowed:
        return {"vary": "origin"}
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": _EXPOSED,
        "vary": "origin",
    }


def is_preflight(http: HttpExchange) -> bool:
    """Whether a browser asks for permission, which it does without a key."""
    return (
        http.scope["method"] == "OPTIONS"
        and http.header("access-control-request-method") is not None
        and "access-control-allow-origin" in http.response_headers
    )


async def respond_to_preflight(http: HttpExchange, methods: str) -> None:
    headers = {"access-control-allow-methods": methods, "access-control-max-age": _MAX_AGE}
    if requested := http.header("access-control-request-headers"):
        headers["access-control-allow-headers"] = requested
    if http.header("access-control-request-private-network"):
        headers["access-control-allow-private-network"] = "true"
    await http.respond_empty(204, headers)
