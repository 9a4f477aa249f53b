"""A private Ray cluster on this machine, or an existing one.

Any client of a cluster can run code in it. So a private cluster listens on loopback and
requires a token.
"""

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headrace.errors import RequestError

_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum."""
_SERVE_ENV = {
    # Call replicas and handles in their event loop, not over the queue of another thread.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Autoscaling uses the running requests of each handle.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
_PRIVATE_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Lets a node have the address of the loopback interface, which Ray otherwise replaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int = 1
    max_replicas: int = 0
    """Maximum; 0: always `replicas`."""
    up_seconds: float = 10.0
    down_seconds: float = 120.0
    """Seconds of low load before a replica ends."""


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[bool]:
    """Join the cluster of `RAY_ADDRESS`, or start a private one; yields whether it is private.

    Call it before Ray is imported. Raises RequestError if it cannot join.
    """
    os.environ.update(_SERVE_ENV)
    if os.environ.get("RAY_ADDRESS"):
        with _joined():
            yield False
        return
    os.environ.update(_PRIVATE_ENV | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    # Ray's workers import from the paths of this process.
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    with _cluster_folder() as folder:
        import ray

        try:
            ray.init(
                num_cpus=num_cpus,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=_LOOPBACK,
                _temp_dir=folder,
            )
            yield True
        finally:
            ray.shutdown()


@contextmanager
def _cluster_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="headrace-ray-")
    command = [sys.executable, "-P", "-m", "headrace.scaleout.ray_reaper", folder, str(os.getpid())]
    # Leaving this context closes the reaper's input, which starts its work, and waits for it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield folder


@contextmanager
def _joined() -> Iterator[None]:
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RequestError(
            f"RAY_ADDRESS '{os.environ['RAY_ADDRESS']}' is no Ray cluster that this process can "
            f"join: {error}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
