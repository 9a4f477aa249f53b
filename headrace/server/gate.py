"""What every request passes before its handler: its key, the host it names, its route; and where
all errors end.
"""

import hmac
import logging
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from time import monotonic

from headrace.errors import HeadraceError
from headrace.server.asgi import DONE, Call, Disconnected, Handler, Receive, Scope, Send, event
from headrace.server.errors import ApiError, anthropic_body, as_api_error
from headrace.server.request_record import Observer
from headrace.server.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/health", "/health/live", "/health/ready")
"""Routes that need no key: they say nothing but whether the server is well."""

Routes = Mapping[str, Mapping[str, Handler]]
"""By path and method."""

log = logging.getLogger("headrace.server")


class Gate:
    """The ASGI application: default is no."""

    def __init__(
        self,
        routes: Routes,
        prefixes: Mapping[str, Handler],
        settings: Settings,
        observers: Iterable[Observer] = (),
    ) -> None:
        """`prefixes`: routes that end in a name, by how they begin; they are read only. `observers`
        hear of all requests.
        """
        self._routes = routes
        self._prefixes = prefixes
        self._settings = settings
        self._observers = tuple(observers)
        self._keys = tuple(key.encode() for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":  # a websocket; there is no lifespan: see `serve`
            return
        call, begun = Call(scope, receive, send, self._settings), monotonic()
        try:
            self._check(call)
            await self._handler(scope["path"], scope["method"])(call)
        except Disconnected:
            call.record.error = "client_left"
        except Exception as error:
            await self._explain(call, error)
        finally:
            call.record.seconds = monotonic() - begun
            for observer in self._observers:
                observer(call.record)

    def _check(self, call: Call) -> None:
        """Look at host and key, by the path as it came: never by a URL that was put together from
        headers.
        """
        if (
            not self._keys
            and self._settings.host in LOOPBACK
            and _host_name(call.header("host")) not in LOOPBACK
        ):
            # A page in a browser may have its own name resolved to this machine.
            raise ApiError(403, "forbidden_host", "this server answers to localhost only")
        if self._keys and call.scope["path"] not in _OPEN:
            call.key = self._key_of(call)

    def _key_of(self, call: Call) -> str:
        """The key that the request brings. Raises ApiError where it has none of ours."""
        given = _credentials(call).encode("utf-8", "surrogateescape")
        found = [
            key for key in self._keys if hmac.compare_digest(key, given)
        ]  # all are compared, whichever it is
        if not found:
            needed = "a valid API key is needed: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, "invalid_api_key", needed, kind="authentication_error")
        return found[0].decode()

    def _handler(self, path: str, method: str) -> Handler:
        methods = self._routes.get(path)
        if methods is None:
            handler = next(
                (handler for prefix, handler in self._prefixes.items() if path.startswith(prefix)),
                None,
            )
            if handler is None:
                raise ApiError(404, "not_found", "there is no such route")
            methods = {"GET": handler}
        if method not in methods:
            refused = ApiError(405, "method_not_allowed", f"this route takes {', '.join(methods)}")
            refused.headers["allow"] = ", ".join(methods)
            raise refused
        return methods[method]

    async def _explain(self, call: Call, error: Exception) -> None:
        told = as_api_error(error)
        call.record.error = told.code
        if told.status == 500:
            log.error("a request to %r failed", call.scope["path"], exc_info=error)
        elif told.status > 500:
            log.warning(
                "%s: %s", told.code, error if isinstance(error, HeadraceError) else told.message
            )
        if not call.responding:
            body = (
                anthropic_body(told) if call.scope["path"].startswith("/v1/messages") else told.body
            )
            await call.respond(body, told.status, told.headers)


def stream_error(error: Exception) -> bytes:
    """An error that comes after the status has been sent, as the last events of a stream."""
    told = as_api_error(error)
    if told.status == 500:
        log.error("a stream failed", exc_info=error)
    return event(told.body) + DONE


def _host_name(host: str | None) -> str:
    """The name in a Host header, without its port."""
    name = (host or "").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _credentials(call: Call) -> str:
    """The key in the headers: as OpenAI's clients send it, as Anthropic's do, or as the password
    that a browser asks for.
    """
    scheme, _, rest = (call.header("authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return b64decode(rest, validate=True).decode().partition(":")[2]
        except (Base64Error, UnicodeDecodeError):
            return ""
    return call.header("x-api-key") or ""
