"""Runs the server: starts the engine beside the rest, listens, and ends in order.

SIGTERM and SIGINT drain it: no new requests, those under way have `drain_seconds`. A second signal
ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from headrace.config import EngineConfig
from headrace.errors import HeadraceError, RequestError
from headrace.remote.engine import RemoteEngine
from headrace.server.app import make_app
from headrace.server.asgi_app import LOOPBACK
from headrace.server.connection import Connection
from headrace.server.request_record import JsonFormatter, log_request
from headrace.server.settings import Settings
from headrace.server.startup import start_server
from headrace.server.state import ServerState
from headrace.server.tracing import Tracer, otlp_exporter

_POLL = 0.05
_SEND_BUFFER = 1 << 18
"""Bytes that the system keeps for a client that does not read; left alone it would keep megabytes.
"""


class PortInUseError(HeadraceError):
    """The address is taken."""

    exit_code = 5


def check(settings: Settings) -> None:
    """Raise RequestError for settings that would serve strangers."""
    if settings.host not in LOOPBACK and not settings.api_keys:
        raise RequestError(
            f"{settings.host} can be reached from other machines: give an --api-key, or "
            "listen on 127.0.0.1"
        )


Announce = Callable[[ServerState, int], None]
"""Called with what is served and its port once it is ready."""


def serve(
    model: str,
    config: EngineConfig,
    settings: Settings,
    make_engine: Callable[[], RemoteEngine],
    announce: Announce,
) -> int:
    """Serve until a signal ends it; returns the exit code. `make_engine` is called within the event
    loop.

    Raises the errors of `load_model`, PortInUseError and EngineStartError.
    """
    check(settings)
    with contextlib.ExitStack() as held:
        tracer = (
            Tracer(otlp_exporter(settings.otlp_endpoint), settings.model_name)
            if settings.otlp_endpoint
            else None
        )
        if tracer:
            held.callback(tracer.close)
        listener = held.enter_context(listen(settings))
        return asyncio.run(_serve(model, config, settings, make_engine, listener, tracer, announce))


def listen(settings: Settings) -> socket.socket:
    """The socket of the address. Raises PortInUseError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; else a response waits 40
    # ms for the client's acknowledgement.
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


async def _serve(
    model: str,
    config: EngineConfig,
    settings: Settings,
    make_engine: Callable[[], RemoteEngine],
    listener: socket.socket,
    tracer: Tracer | None,
    announce: Announce,
) -> int:
    async with start_server(model, config, settings, make_engine()) as state:
        return await _listen_and_drain(state, listener, tracer, announce)


class _Server(uvicorn.Server):
    """A server whose signals are handled here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen_and_drain(
    state: ServerState, listener: socket.socket, tracer: Tracer | None, announce: Announce
) -> int:
    settings = state.settings
    server = _Server(
        uvicorn.Config(
            make_app(state, filter(None, (log_request, tracer))),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            ws="none",
            http=partial(Connection, settings=settings),  # type: ignore[arg-type] # uvicorn calls it, and no more
        )
    )
    loop, signals = asyncio.get_running_loop(), list[int]()
    changed = asyncio.Event()

    def ask(number: int) -> None:
        signals.append(number)
        changed.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask, number)
    serving = asyncio.ensure_future(server.serve([listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    announce(state, listener.getsockname()[1])
    try:
        while not signals and state.engine.state != "dead":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _POLL * 10)
        if state.engine.state == "dead":
            logging.getLogger("headrace.server").error(
                "the engine ended too often: the server ends"
            )
            return 1
        state.draining = True
        deadline = loop.time() + settings.drain_seconds
        while state.num_sequences and loop.time() < deadline and len(signals) < 2:
            await asyncio.sleep(_POLL)
        return 0
    finally:
        state.draining = True
        await state.engine.close()  # streams that are left end with an error
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 2)


def stderr_log(form: str) -> None:
    """Write the server's log to stderr as `text` or `json`, from the level on that `HEADRACE_LOG`
    says.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=os.environ.get("HEADRACE_LOG", "INFO").upper())
