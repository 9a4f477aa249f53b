"""Serves a model by replicas on Ray: this process is the frontend, and the replicas are actors,
here or in a cluster that runs already.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.config import EngineConfig
from headrace.loader.load import open_model
from headrace.parallel.config import mesh_of, threads_per_rank
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError
from headrace.scaleout.fleet import Fleet
from headrace.scaleout.ray_cluster import Scale, ray_cluster
from headrace.server.serving import Announce, check, serve
from headrace.server.settings import Settings


def serve_replicas(
    model: str,
    config: EngineConfig,
    settings: Settings,
    adapters: Mapping[str, str],
    scale: Scale,
    announce: Announce,
) -> int:
    """Serve until a signal ends it; returns the exit code. Replicas share the cores of this machine
    unless `config.threads` says more.

    Raises RequestError where Ray is missing or the cluster cannot be joined, and as `serve`.
    """
    check(settings)
    open_model(
        model, config
    )  # what is wrong with it is said before Ray is started; and no two replicas fetch it
    mesh, most = mesh_of(config), max(scale.replicas, scale.max_replicas)
    config = replace(
        config, threads=config.threads or max(1, threads_per_rank(config, mesh) // most)
    )
    with ray_cluster(most * config.threads * mesh.ranks) as is_ours:
        from headrace.scaleout.ray_app import replicas
        from headrace.scaleout.ray_dispatcher import RayDispatcher
        from headrace.scaleout.ray_replica import fingerprint_of

        # In a cluster of others there may be more applications, of this name as well.
        app = "headrace" if is_ours else f"headrace-{secrets.token_hex(4)}"
        application = replicas(frames.Setup(model, config, dict(adapters)), settings, scale)
        try:
            dispatcher = RayDispatcher(
                partial(_deploy, application, app), app, partial(fingerprint_of, model, config)
            )
            return serve(model, config, settings, lambda: Fleet(dispatcher, config.seed), announce)
        finally:
            if not is_ours:
                _delete(app)


def _deploy(application: Any, app: str) -> Any:
    """A handle to the replicas of an application, once there are all that it begins with. Raises
    EngineDeadError.
    """
    from ray import serve as ray_serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing it has set another
    ray_serve.start(
        proxy_location="Disabled"
    )  # nothing of Ray listens for HTTP, unless it does already
    try:
        return ray_serve.run(application, name=app, route_prefix=None)
    except RuntimeError:
        raise EngineDeadError(f"the replicas could not be started: {_reason(app)}") from None


def _reason(app: str) -> str:
    """The last error of a replica that Ray tells of."""
    from ray import serve as ray_serve

    told = ray_serve.status().applications[app].deployments["replica"].message
    *_, last = [line.strip() for line in told.splitlines() if "Error" in line] or [
        "Ray does not say why"
    ]
    return re.sub(r"^[\w.]*Error: ", "", last)


def _delete(app: str) -> None:
    from ray import serve as ray_serve

    ray_serve.delete(app)
