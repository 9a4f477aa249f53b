"""Status of a replica, which it sends repeatedly to the frontend of its fleet."""

import msgspec

from headrace.remote import frames
from headrace.remote.engine import State


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    """Random id of the engine's start; another start has an empty KV cache."""
    state: State
    draining: bool
    """Whether it refuses new requests and ends after the running requests."""
    info: frames.EngineInfo
    report: frames.Report
    adapters: dict[str, str]
    restarts: int
    step_seconds: float
    model: str = ""

    @property
    def accepts_requests(self) -> bool:
        return self.state == "ready" and not self.draining


def encode_status(status: ReplicaStatus) -> bytes:
    body = msgspec.msgpack.encode(status)
    return frames.length_prefix(body) + body


def read_status(body: bytes) -> ReplicaStatus:
    """Decode the body of a frame. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=ReplicaStatus)
