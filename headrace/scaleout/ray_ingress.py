"""The frontend as a deployment of Ray Serve, for clusters whose own proxies take HTTP (KubeRay);
see `ray_app.build`.
"""

import os
from functools import partial
from typing import Any

import msgspec
from ray import serve

from headrace.remote import frames
from headrace.scaleout.fleet import Fleet
from headrace.scaleout.ray_dispatcher import RayDispatcher
from headrace.scaleout.ray_replica import fingerprint_of
from headrace.server.app import make_app
from headrace.server.asgi_app import AsgiApp
from headrace.server.http_exchange import Receive, Scope, Send
from headrace.server.request_record import log_request
from headrace.server.serving import check
from headrace.server.settings import Settings
from headrace.server.startup import start_server


@serve.ingress()
class Ingress:
    """Ray Serve makes one in each process that takes requests, and asks it for the app."""

    def __init__(self, replicas: Any, setup: bytes, settings: bytes) -> None:
        """`replicas`: a handle to the deployment of `ray_replica.Replica`; `setup`, `settings`: a
        `frames.Setup` and `Settings`.

        Raises RequestError where there is no key in HEADRACE_API_KEY: what a proxy of a cluster
        passes on may come from anywhere.
        """
        (body,) = frames.bodies(bytearray(setup))
        keys = tuple(filter(None, [os.environ.get("HEADRACE_API_KEY")]))
        self._settings = msgspec.structs.replace(
            msgspec.json.decode(settings, type=Settings), host="0.0.0.0", api_keys=keys
        )
        check(self._settings)
        self._setup = frames.read_setup(body)
        known = partial(fingerprint_of, self._setup.model, self._setup.config)
        self._dispatcher = RayDispatcher(
            lambda: replicas, serve.get_replica_context().app_name, known
        )

    def __serve_build_asgi_app__(self) -> "IngressApp":
        return IngressApp(self._setup, self._settings, self._dispatcher)


class IngressApp:
    """The server's app, from ASGI's `lifespan.startup` to its `lifespan.shutdown`."""

    def __init__(self, setup: frames.Setup, settings: Settings, dispatcher: RayDispatcher) -> None:
        self._setup = setup
        self._settings = settings
        self._dispatcher = dispatcher
        self._gate: AsgiApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the life of the app."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._gate:
            await self._gate(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        fleet = Fleet(self._dispatcher, self._setup.config.seed)
        async with start_server(
            self._setup.model, self._setup.config, self._settings, fleet
        ) as served:
            self._gate = make_app(served, (log_request,))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            served.draining = True
        await send({"type": "lifespan.shutdown.complete"})
