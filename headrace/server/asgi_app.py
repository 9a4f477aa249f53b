import hmac
import logging
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping

from headrace.errors import HeadraceError
from headrace.server.cors import cors_headers, is_preflight, respond_to_preflight
from headrace.server.errors import ApiError, anthropic_body, as_api_error
from headrace.server.http_exchange import (
    SSE_DONE,
    Disconnected,
    Handler,
    HttpExchange,
    Receive,
    Scope,
    Send,
    sse_event,
)
from headrace.server.paths import no_such_route, route_path
from headrace.server.request_record import Observer
from headrace.server.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PUBLIC = ("/health", "/health/live", "/health/ready")
"""Routes that need no API key."""
_EXPECTED = ("model_loading", "server_shutting_down")
"""Codes of times that the operator knows: the start and the end of the server."""

Routes = Mapping[str, Mapping[str, Handler]]

log = logging.getLogger("headrace.server")


class AsgiApp:
    """Authenticates a request, runs its handler and turns exceptions into error responses."""

    def __init__(
        self,
        routes: Routes,
        prefix_routes: Routes,
        settings: Settings,
        observers: Iterable[Observer] = (),
    ) -> None:
        """`prefix_routes` are routes whose paths end in a name."""
        self._routes = routes
        self._prefix_routes = prefix_routes
        self._settings = settings
        self._observers = tuple(observers)
        self._keys = tuple(key.encode() for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a websocket; uvicorn is told to send no lifespan events
            return
        http = HttpExchange(scope, receive, send, self._settings)
        try:
            await self._respond(http)
        except Disconnected:
            http.record.error = "client_left"
        except Exception as error:
            await self._respond_with_error(http, error)
        finally:
            http.record.end(http.stopwatch)
            for observer in self._observers:
                observer(http.record)

    async def _respond(self, http: HttpExchange) -> None:
        if found := route_path(http.path, self._is_route):
            http.path, http.deployment = found
        self._check_host(http)
        http.response_headers |= cors_headers(http, self._settings.allowed_origins)
        if is_preflight(http):
            methods = ", ".join(self._methods(http.path))
            return await respond_to_preflight(http, methods)
        if self._keys and http.path not in _PUBLIC:
            http.api_key = self._valid_key(http)
        await self._handle(http)

    def _check_host(self, http: HttpExchange) -> None:
        """Raise ApiError for another host: a web page can let its own name mean this machine."""
        if self._keys or self._settings.host not in LOOPBACK:
            return
        host = http.header("host")
        if host is None and http.scope.get("http_version") == "1.0":
            return  # no browser
        if _host_name(host) not in LOOPBACK:
            raise ApiError(
                403,
                "forbidden_host",
                "the Host header must be localhost; --api-key allows other hosts",
            )

    def _valid_key(self, http: HttpExchange) -> str:
        given = _credentials(http).encode("utf-8", "surrogateescape")
        # All keys are compared, so that the time does not depend on the key.
        matches = [key for key in self._keys if hmac.compare_digest(key, given)]
        if not matches:
            raise ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or invalid; send `Authorization: Bearer KEY`",
                kind="authentication_error",
            )
        return matches[0].decode()

    def _is_route(self, path: str) -> bool:
        return path in self._routes or any(map(path.startswith, self._prefix_routes))

    def _methods(self, path: str) -> dict[str, Handler]:
        """Return the handlers of a route by method. Raises ApiError without a route."""
        methods = dict(self._routes.get(path, {}))
        for prefix, handlers in self._prefix_routes.items():
            if not methods and path.startswith(prefix):
                methods.update(handlers)
        if not methods:
            raise ApiError(404, "not_found", no_such_route(path, self._routes))
        if "GET" in methods:
            methods["HEAD"] = methods["GET"]
        return methods

    async def _handle(self, http: HttpExchange) -> None:
        methods, method = self._methods(http.path), http.scope["method"]
        if method in methods:
            return await methods[method](http)
        allowed = ", ".join([*methods, "OPTIONS"])
        if method == "OPTIONS":
            return await http.respond_empty(204, {"allow": allowed})
        error = ApiError(405, "method_not_allowed", f"the method must be {allowed}")
        error.headers["allow"] = allowed
        raise error

    async def _respond_with_error(self, http: HttpExchange, error: Exception) -> None:
        api_error = as_api_error(error)
        path = http.path
        http.record.error = api_error.code
        if api_error.status == 500:
            log.error("request to %r failed", path, exc_info=error)
        elif api_error.status > 500 and api_error.code not in _EXPECTED:
            reason = error if isinstance(error, HeadraceError) else api_error.message
            log.warning("%s: %s", api_error.code, reason)
        if not http.response_started:
            body = anthropic_body(api_error) if path.startswith("/v1/messages") else api_error.body
            await http.respond(body, api_error.status, api_error.headers)


def sse_error(error: Exception) -> bytes:
    """Encode an error of a stream whose status has been sent."""
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("stream failed", exc_info=error)
    return sse_event(api_error.body) + SSE_DONE


def _host_name(host: str | None) -> str:
    name = (host or "").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _credentials(http: HttpExchange) -> str:
    scheme, _, rest = (http.header("authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return b64decode(rest, validate=True).decode().partition(":")[2]
        except (Base64Error, UnicodeDecodeError):
            return ""
    return http.header("x-api-key") or http.header("api-key") or ""
