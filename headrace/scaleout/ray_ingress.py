"""The frontend as a deployment of Ray Serve, for clusters whose proxies serve HTTP (KubeRay)."""

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
    def __init__(self, replicas: Any, setup: bytes, settings: bytes) -> None:
        """`setup` and `settings` are encoded. Raises RequestError without an API key."""
        (body,) = frames.bodies(bytearray(setup))
        keys = tuple(filter(None, [os.environ.get("HEADRACE_API_KEY")]))
        self._settings = msgspec.structs.replace(
            msgspec.json.decode(settings, type=Settings), host="0.0.0.0", api_keys=keys
        )
        check(self._settings)
        self._setup = frames.read_setup(body)
        fingerprint = partial(fingerprint_of, self._setup.model, self._setup.config)
        self._dispatcher = RayDispatcher(
            lambda: replicas, serve.get_replica_context().app_name, fingerprint
        )

    def __serve_build_asgi_app__(self) -> "IngressApp":
        return IngressApp(self._setup, self._settings, self._dispatcher)


class IngressApp:
    def __init__(self, setup: frames.Setup, settings: Settings, dispatcher: RayDispatcher) -> None:
        self._setup = setup
        self._settings = settings
        self._dispatcher = dispatcher
        self._app: AsgiApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif self._app:
            await self._app(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        fleet = Fleet(self._dispatcher, self._setup.config.seed)
        async with start_server(
            self._setup.model, self._setup.config, self._settings, fleet
        ) as state:
            self._app = make_app(state, (log_request,))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            state.draining = True
        await send({"type": "lifespan.shutdown.complete"})
