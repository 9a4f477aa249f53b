"""The application on Ray Serve."""

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

_HEALTH_SECONDS = 2.0
_HEALTH_TIMEOUT = 10.0
_TARGET_LOAD = 0.7
"""Share of running sequences that needs no further replica."""
_MIN_LOOK_BACK = 1.0
_MAX_AT_INGRESS = 10_000
"""High, since the app itself limits requests."""
_ROUTER = f"{__name__}.PrefixRequestRouter"
"""Ray imports the router by this path: it would copy a local class by value."""
_MAX_ATTEMPTS = 3


class AppArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    adapters: dict[str, str] = {}
    scale: Scale = Scale()


def build(args: dict[str, Any]) -> Application:
    """Build the application with its ingress, for `serveConfigV2`. Raises RequestError."""
    try:
        parsed = msgspec.convert(args, AppArgs)
        check_names("server setting", parsed.server, Settings.__struct_fields__)
        settings = msgspec.convert({"model_name": parsed.model, **parsed.server}, Settings)
    except msgspec.ValidationError as error:
        raise RequestError(f"args of the application: {error}") from None
    config = engine_config(parsed.engine)
    if not config.threads:
        raise RequestError(
            "args of the application: engine.threads is missing; set it to the cores of a replica"
        )
    setup = frames.Setup(parsed.model, config, parsed.adapters)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=_MAX_AT_INGRESS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        logging_config=LoggingConfig(enable_access_log=False),
    )(Ingress)
    return ingress.bind(
        replicas(setup, settings, parsed.scale),
        frames.encode(setup),
        msgspec.json.encode(settings),
    )


def replicas(setup: frames.Setup, settings: Settings, scale: Scale) -> Application:
    """Each rank has `config.threads` cores, which must be set."""
    max_running = setup.config.max_seqs
    scaling: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas > scale.replicas:
        config = AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=max(1.0, _TARGET_LOAD * max_running),
            metrics_interval_s=_MIN_LOOK_BACK / 2,
            look_back_period_s=max(_MIN_LOOK_BACK, scale.up_seconds / 2),
            upscale_delay_s=scale.up_seconds,
            downscale_delay_s=scale.down_seconds,
        )
        scaling = {"autoscaling_config": config}

    mesh = mesh_of(setup.config)
    if mesh.ranks > 1:
        # One bundle per rank, all on one node if it has the cores.
        scaling["placement_group_bundles"] = [{"CPU": setup.config.threads}] * mesh.ranks
        scaling["placement_group_strategy"] = "PACK"

    deployment = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": setup.config.threads},
        max_ongoing_requests=max_running + settings.max_waiting,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        max_constructor_retry_count=_MAX_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **scaling,
    )(Replica)
    return deployment.bind(frames.encode(setup), settings.stall_seconds)
