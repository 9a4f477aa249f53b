"""Ray on this machine for as long as a command runs, or a cluster that runs already.

A process that can speak to a Ray cluster can run code in it. So a cluster of our own listens on the
loopback interface, takes a token that only its processes know, has no dashboard and sends no
statistics; its files are in a folder that goes with it.
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
"""The least that Ray takes: nothing of ours goes through its object store."""
_SERVE = {
    # A replica and a handle are called in the event loop that they have, and not through the queue
    # of another thread.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # What scaling goes by: how many requests a handle has under way.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
_OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # a node may have the address of the loopback interface, which Ray replaces otherwise
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there are."""

    replicas: int = 1
    """At least."""
    max_replicas: int = 0
    """At most, as many as requests under way need; 0: never more than the least."""
    up_seconds: float = 10.0
    """For which there must have been too few before there are more."""
    down_seconds: float = 120.0
    """For which there must have been too many before there are fewer."""


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[bool]:
    """Ray in this process: of the cluster that `RAY_ADDRESS` names, or of one with so many cores,
    which ends with the context. Returns whether it is such a one.

    Nothing may have imported Ray before. Raises RequestError where there is no such cluster.
    """
    os.environ.update(_SERVE)
    if os.environ.get("RAY_ADDRESS"):
        with _joined():
            yield False
        return
    os.environ.update(_OWN | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        map(os.path.abspath, sys.path)
    )  # its workers import from where this process does
    with _folder() as folder:
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
def _folder() -> Iterator[str]:
    """A folder for the files of a cluster. When this process ends, in whatever way, another removes
    it, and ends what is left of the cluster (`ray_reaper.py`).
    """
    folder = tempfile.mkdtemp(prefix="headrace-ray-")
    command = [sys.executable, "-P", "-m", "headrace.scaleout.ray_reaper", folder, str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True
    ):  # whose input is closed then, and which is waited for
        yield folder


@contextmanager
def _joined() -> Iterator[None]:
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RequestError(
            f"RAY_ADDRESS names {os.environ['RAY_ADDRESS']}, where no Ray cluster could "
            f"be joined: {error}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
