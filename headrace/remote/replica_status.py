"""Status that a replica sends to its frontend."""

import msgspec

from headrace.remote import frames
from headrace.remote.engine import State


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    """Random id of the start; a new id means an empty KV cache."""
    state: State
    draining: bool
    info: frames.EngineInfo
    report: frames.Report
    adapters: dict[str, str]
    restarts: int
    step_seconds: float
    model: str = ""
    """See `checkpoint.fingerprint`."""
    weights: str = ""
    """See `quant.digest`."""
    adapter_digests: dict[str, str] = {}
    max_sequences: int = 0
    """Sequences that may run and wait; 0: unknown."""
    is_full: bool = False
    """Whether so many run and wait."""

    @property
    def accepts_requests(self) -> bool:
        return self.state == "ready" and not self.draining


def encode_status(status: ReplicaStatus) -> bytes:
    body = msgspec.msgpack.encode(status)
    return frames.length_prefix(body) + body


def read_status(body: bytes) -> ReplicaStatus:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=ReplicaStatus)
