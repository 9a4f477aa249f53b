"""What replicas must have in common, so that any of them continues a request of another."""

import logging
from collections.abc import Iterable, Mapping
from time import monotonic

from headrace.remote.replica_status import ReplicaStatus

_EQUAL_INFO = (
    "architecture",
    "vocab_size",
    "dim",
    "max_model_len",
    "kv_dtype",
    "backend",
    "lossy",
    "activations",
    "block_size",
    "latent_attention",
    "acceptance_method",
    "instructions",
    "version",
)
"""Properties of `EngineInfo` that change the bits of results, or which requests are valid."""

log = logging.getLogger("headrace.scaleout")


class EqualWorkers:
    """Compares replicas with the first one.

    If no replica like it is left, others may take over after the requests that it ran have ended.
    """

    def __init__(self, name: str, takeover_seconds: float) -> None:
        """`name`: what a replica is called; `takeover_seconds`: more than a request waits."""
        self._name = name
        self._takeover_seconds = takeover_seconds
        self._first: dict[str, object] | None = None
        self._last_seen = monotonic()
        self._adapter_digests: dict[str, str] = {}
        self._reported = set[tuple[str, str]]()

    def differences(self, status: ReplicaStatus, others: Iterable[ReplicaStatus]) -> str:
        """Describe how a replica differs; empty if it may serve. `others`: those that serve."""
        found, now = _identity(status), monotonic()
        known = [found, *map(_identity, others)]
        if self._first is None or now - self._last_seen > self._takeover_seconds:
            self._first = found
        if self._first in known:
            self._last_seen = now
        return ", ".join(
            f"{name} {found[name]!r}, not {value!r}"
            for name, value in self._first.items()
            if found[name] != value
        )

    def has_adapter(self, url: str, status: ReplicaStatus, name: str) -> bool:
        """Whether a replica has an adapter, with the weights that it has on the others."""
        if name not in status.adapters:
            return False
        digest = status.adapter_digests.get(name, "")
        if not digest or digest == self._adapter_digests.get(name):
            return True
        if (url, name) not in self._reported:
            self._reported.add((url, name))
            log.error(
                "%s has other weights under the name of adapter %r than the first %s, and gets no "
                "requests for it; make its files the same on all hosts",
                url,
                name,
                self._name,
            )
        return False

    def learn_adapters(self, replicas: Mapping[str, ReplicaStatus]) -> None:
        """Take the first digest of each name, unless a replica still has the known one."""
        digests: dict[str, list[str]] = {}
        for status in replicas.values():
            for name, digest in status.adapter_digests.items():
                digests.setdefault(name, []).append(digest)
        self._adapter_digests = {
            name: known if (known := self._adapter_digests.get(name, "")) in found else found[0]
            for name, found in digests.items()
        }
        self._reported = {
            (url, name)
            for url, name in self._reported
            if url in replicas and name in replicas[url].adapters
        }


def _identity(status: ReplicaStatus) -> dict[str, object]:
    info = {name: getattr(status.info, name) for name in _EQUAL_INFO}
    return {**info, "weights": status.weights}
