"""Runs the HTTP server. The first SIGTERM or SIGINT drains it, a second one ends it at once."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from time import monotonic

import uvicorn

from headrace.config import EngineConfig
from headrace.errors import HeadraceError, RequestError
from headrace.remote.engine import RemoteEngine
from headrace.server.app import make_app, make_loading_app
from headrace.server.asgi_app import LOOPBACK, AsgiApp
from headrace.server.connection import Connection
from headrace.server.http_exchange import Receive, Scope, Send
from headrace.server.request_record import JsonFormatter, Observer, log_request
from headrace.server.settings import Settings
from headrace.server.startup import start_server
from headrace.server.state import ServerState
from headrace.server.tracing import Tracer, otlp_exporter

_POLL_SECONDS = 0.05
_SEND_BUFFER = 1 << 18
"""The default of the kernel is megabytes."""

_log = logging.getLogger("headrace.server")


class PortInUseError(HeadraceError):
    exit_code = 5


def check(settings: Settings) -> None:
    """Raise RequestError if other machines could use the server without an API key."""
    if settings.host not in LOOPBACK and not settings.api_keys:
        raise RequestError(
            f"host {settings.host} can be reached from other machines; set --api-key, or "
            "listen on 127.0.0.1"
        )


Announce = Callable[[ServerState, int], None]


def serve(
    model: str,
    config: EngineConfig,
    settings: Settings,
    make_engine: Callable[[], RemoteEngine],
    announce: Announce,
) -> int:
    """Serve until a signal arrives; returns the exit code.

    The event loop calls `make_engine`. Raises the errors of `load_model`, PortInUseError and
    EngineStartError.
    """
    check(settings)
    with contextlib.ExitStack() as stack:
        tracer = None
        if settings.otlp_endpoint:
            tracer = Tracer(otlp_exporter(settings.otlp_endpoint), settings.model_name)
            stack.callback(tracer.close)
        listener = stack.enter_context(listen(settings))

        observers: list[Observer] = [log_request, *([tracer] if tracer else [])]
        port = listener.getsockname()[1]

        async def run() -> int:
            engine, begun = make_engine(), monotonic()
            app = _CurrentApp(make_loading_app(settings, observers))
            async with _http_server(app, settings, listener):
                _log.info("loading %s; until it is ready, port %d responds 503", model, port)
                async with start_server(model, config, settings, engine) as state:
                    app.current = make_app(state, observers)
                    _log.info("ready after %.1f s", monotonic() - begun)
                    announce(state, port)
                    return await _run(state)

        return asyncio.run(run())


class _CurrentApp:
    """An app that another replaces when the model is loaded."""

    def __init__(self, current: AsgiApp) -> None:
        self.current = current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.current(scope, receive, send)


def listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given. With Nagle's algorithm a
    # response waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"{settings.host}:{settings.port}: {error.strerror}; choose another with --port"
        ) from None
    listener.set_inheritable(False)
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _http_server(
    app: _CurrentApp, settings: Settings, listener: socket.socket
) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            ws="none",
            http=partial(Connection, settings=settings),  # type: ignore[arg-type] # uvicorn only calls it
        )
    )
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 2)


async def _run(state: ServerState) -> int:
    loop, signals = asyncio.get_running_loop(), list[int]()
    signal_received = asyncio.Event()

    def on_signal(number: int) -> None:
        signals.append(number)
        signal_received.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        while not signals and state.engine.state != "dead":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signal_received.wait(), _POLL_SECONDS * 10)
        if state.engine.state == "dead":
            _log.error("the engine ended too often; the server shuts down")
            return 1
        state.draining = True
        deadline = loop.time() + state.settings.drain_seconds
        while state.num_sequences and loop.time() < deadline and len(signals) < 2:
            await asyncio.sleep(_POLL_SECONDS)
        return 0
    finally:
        state.draining = True
        await state.engine.close()  # ends the remaining streams with an error


def stderr_log(log_format: str) -> None:
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=os.environ.get("HEADRACE_LOG", "INFO").upper())
