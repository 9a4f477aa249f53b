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
    """Serve until a signal arrives; returns the exit code.

    Raises RequestError if the cluster cannot be joined, and as `serve` does.
    """
    check(settings)
    # Report a problem of the model before Ray starts, and download it only once.
    open_model(model, config)
    mesh, max_replicas = mesh_of(config), max(scale.replicas, scale.max_replicas)
    threads = config.threads or max(1, threads_per_rank(config, mesh) // max_replicas)
    config = replace(config, threads=threads)
    with ray_cluster(max_replicas * threads * mesh.ranks) as is_private:
        from headrace.scaleout.ray_app import replicas
        from headrace.scaleout.ray_dispatcher import RayDispatcher
        from headrace.scaleout.ray_replica import fingerprint_of

        # A shared cluster may have other applications with this name.
        app = "headrace" if is_private else f"headrace-{secrets.token_hex(4)}"
        application = replicas(frames.Setup(model, config, dict(adapters)), settings, scale)
        try:
            dispatcher = RayDispatcher(
                partial(_deploy, application, app), app, partial(fingerprint_of, model, config)
            )
            return serve(model, config, settings, lambda: Fleet(dispatcher, config.seed), announce)
        finally:
            if not is_private:
                _delete(app)


def _deploy(application: Any, app: str) -> Any:
    from ray import serve as ray_serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # the import has set another level
    ray_serve.start(proxy_location="Disabled")  # starts no HTTP server of Ray
    try:
        return ray_serve.run(application, name=app, route_prefix=None)
    except RuntimeError:
        raise EngineDeadError(f"the replicas could not start: {_last_error(app)}") from None


def _last_error(app: str) -> str:
    from ray import serve as ray_serve

    message = ray_serve.status().applications[app].deployments["replica"].message
    errors = [line.strip() for line in message.splitlines() if "Error" in line]
    return re.sub(r"^[\w.]*Error: ", "", errors[-1] if errors else "Ray reports no reason")


def _delete(app: str) -> None:
    from ray import serve as ray_serve

    ray_serve.delete(app)
