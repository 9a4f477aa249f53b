"""What is deployed on Ray Serve: replicas, and in a cluster that has HTTP of its own an ingress in
front of them.
"""

from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from headrace.errors import RequestError
from headrace.loader.options import engine_config
from headrace.parallel.config import mesh_of
from headrace.remote import frames
from headrace.scaleout.ray_cluster import Scale
from headrace.scaleout.ray_ingress import Ingress
from headrace.scaleout.ray_replica import Replica
from headrace.scaleout.ray_router import PrefixRequestRouter  # noqa: F401 # see _ROUTER
from headrace.server.settings import Settings
from headrace.validation import check_names

_HEALTH = 2.0
"""Seconds between two looks at the health of a replica."""
_HEALTH_ANSWER = 10.0
_LOAD = 0.7
"""Share of the sequences that a replica can run at once at which there are enough replicas."""
_LEAST_LOOK_BACK = 1.0
"""Seconds over which the mean of requests under way is taken, at least."""
_MOST_AT_INGRESS = 10_000
"""Requests: how many are taken on is for the app to say, which answers one too many."""
_ROUTER = f"{__name__}.PrefixRequestRouter"
"""Ray copies a router class out of the module that it is named by, globals and all; named by this
one it is imported from its own.
"""
_ATTEMPTS = 3
"""Starts of a replica that may fail before the application is given up."""


class Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An application as `serveConfigV2` describes it in `args`."""

    model: str
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`; `threads` is how many cores a replica has."""
    server: dict[str, Any] = {}
    """Fields of `Settings`."""
    adapters: dict[str, str] = {}
    """Paths by name."""
    scale: Scale = Scale()


def build(args: dict[str, Any]) -> Application:
    """The whole application of a cluster, ingress included: `import_path:
    headrace.scaleout.ray_app:build` in `serveConfigV2`.

    Raises RequestError for what is no description of one.
    """
    try:
        described = msgspec.convert(args, Described)
        check_names("server setting", described.server, Settings.__struct_fields__)
        settings = msgspec.convert({"model_name": described.model, **described.server}, Settings)
    except msgspec.ValidationError as error:
        raise RequestError(f"args of the application: {error}") from None
    config = engine_config(described.engine)
    if not config.threads:
        raise RequestError(
            "args of the application: engine.threads must say how many cores a replica has"
        )
    setup = frames.Setup(described.model, config, described.adapters)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=_MOST_AT_INGRESS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=_HEALTH,
        health_check_timeout_s=_HEALTH_ANSWER,
        logging_config=LoggingConfig(enable_access_log=False),
    )(Ingress)
    return ingress.bind(
        replicas(setup, settings, described.scale),
        frames.encode(setup),
        msgspec.json.encode(settings),
    )


def replicas(setup: frames.Setup, settings: Settings, scale: Scale) -> Application:
    """The replicas of a model. Each of their ranks has as many cores as threads, which the
    configuration says.
    """
    running = setup.config.max_seqs
    scaling: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas > scale.replicas:
        config = AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=max(1.0, _LOAD * running),
            metrics_interval_s=_LEAST_LOOK_BACK / 2,
            look_back_period_s=max(_LEAST_LOOK_BACK, scale.up_seconds / 2),
            upscale_delay_s=scale.up_seconds,
            downscale_delay_s=scale.down_seconds,
        )
        scaling = {"autoscaling_config": config}
    mesh = mesh_of(setup.config)
    if mesh.ranks > 1:  # a bundle for each rank, on one node if there is room
        scaling |= {
            "placement_group_bundles": [{"CPU": setup.config.threads}] * mesh.ranks,
            "placement_group_strategy": "PACK",
        }
    deployment = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": setup.config.threads},
        max_ongoing_requests=running + settings.max_waiting,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=_HEALTH,
        health_check_timeout_s=_HEALTH_ANSWER,
        max_constructor_retry_count=_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **scaling,
    )(Replica)
    return deployment.bind(frames.encode(setup), settings.stall_seconds)
