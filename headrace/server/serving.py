"""Runs the server: starts the engine beside the rest, listens, and ends in order.

SIGTERM and SIGINT drain it: no new requests, those under way have `drain_seconds`. A second signal ends it at once.
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
from headrace.server.app import make_app
from headrace.server.connection import Connection
from headrace.server.gate import LOOPBACK
from headrace.server.loading import served_model
from headrace.server.served_model import ServedModel
from headrace.server.settings import Settings

_POLL = 0.05
_SEND_BUFFER = 1 << 18
"""Bytes that the system keeps for a client that does not read; left alone it would keep megabytes."""


class PortInUseError(HeadraceError):
    """The address is taken."""

    exit_code = 5


def check(settings: Settings) -> None:
    """Raise RequestError for settings that would serve strangers."""
    if settings.host not in LOOPBACK and not settings.api_keys:
        raise RequestError(f"{settings.host} can be reached from other machines: give an --api-key, or listen on 127.0.0.1")


def serve(
    model: str, config: EngineConfig, settings: Settings, adapters: dict[str, str], announce: Callable[[ServedModel, int], None]
) -> int:
    """Serve until a signal ends it; returns the exit code. `announce` is called with the served and its port once it is ready.

    Raises the errors of `load_model`, PortInUseError and EngineStartError.
    """
    check(settings)
    listener = _listen(settings)
    try:
        return asyncio.run(_serve(model, config, settings, adapters, listener, announce))
    finally:
        listener.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise PortInUseError(f"{settings.host}:{settings.port}: {error.strerror}; choose another with --port") from None
    listener.set_inheritable(False)
    return listener


async def _serve(
    model: str,
    config: EngineConfig,
    settings: Settings,
    adapters: dict[str, str],
    listener: socket.socket,
    announce: Callable[[ServedModel, int], None],
) -> int:
    async with served_model(model, config, settings, adapters) as served:
        return await _listen_and_drain(served, listener, announce)


class _Server(uvicorn.Server):
    """A server whose signals are handled here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen_and_drain(served: ServedModel, listener: socket.socket, announce: Callable[[ServedModel, int], None]) -> int:
    settings = served.settings
    server = _Server(
        uvicorn.Config(
            make_app(served),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            ws="none",
            http=partial(Connection, send_timeout=settings.send_timeout),  # type: ignore[arg-type] # uvicorn calls it, and no more
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
    announce(served, listener.getsockname()[1])
    try:
        while not signals and served.engine.state != "dead":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _POLL * 10)
        if served.engine.state == "dead":
            logging.getLogger("headrace.server").error("the engine ended too often: the server ends")
            return 1
        served.draining = True
        deadline = loop.time() + settings.drain_seconds
        while served.under_way and loop.time() < deadline and len(signals) < 2:
            await asyncio.sleep(_POLL)
        return 0
    finally:
        served.draining = True
        await served.engine.close()  # streams that are left end with an error
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 2)


def stderr_log() -> None:
    """Write the server's log to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=os.environ.get("HEADRACE_LOG", "INFO").upper())
