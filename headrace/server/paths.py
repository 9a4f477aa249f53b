"""Paths of routes, in the other forms that clients send."""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_VERSION = "/v1"
_AZURE = re.compile(
    r"/openai/deployments/(.+?)(/(?:chat/completions|completions|embeddings|responses))"
)
_SLASHES = re.compile("/{2,}")
_AZURE_PREFIX = "/openai/v1/"
_MAX_COMPARED = 200


class RoutePath(NamedTuple):
    path: str
    deployment: str = ""
    """Model that an Azure path names."""


def route_path(path: str, is_route: Callable[[str], bool]) -> RoutePath | None:
    """Find the route of a path with further slashes, with `/v1` twice or never, or of Azure."""
    return next((found for found in _forms(path) if is_route(found.path)), None)


def _forms(path: str) -> Iterator[RoutePath]:
    path = path.rstrip("/") or "/"
    yield RoutePath(path)
    given, path = path, _SLASHES.sub("/", path)
    if azure := _AZURE.fullmatch(path):
        yield RoutePath(_VERSION + azure[2], deployment=azure[1])
        return
    if path.startswith(_AZURE_PREFIX):
        path = path.removeprefix("/openai")
    while path.startswith(_VERSION + "/"):
        path = path.removeprefix(_VERSION)
    yield RoutePath(_VERSION + path)
    if "//" not in given:  # `//health` is not the public route
        yield RoutePath(path)


def no_such_route(path: str, routes: Iterable[str]) -> str:
    """Message that names the path and the most similar route."""
    nearest = difflib.get_close_matches(path[:_MAX_COMPARED], routes, n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"the route {reprlib.repr(path)} does not exist{hint}; /openapi.json lists all routes"
