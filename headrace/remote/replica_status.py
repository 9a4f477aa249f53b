"""What a replica says of itself to the frontend that sends it requests, again and again."""

import msgspec

from headrace.remote import frames
from headrace.remote.engine import State


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is now. One that says nothing for some seconds has no pulse."""

    boot: str
    """Made up at its start: another one has none of the KV that this one had."""
    state: State
    draining: bool
    """Whether it takes no more requests, and ends once those under way have ended."""
    info: frames.EngineInfo
    report: frames.Report
    adapters: dict[str, str]
    restarts: int
    step_seconds: float
    model: str = ""
    """The fingerprint of what it serves: see `headrace.checkpoint.fingerprint`."""

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state == "ready" and not self.draining


def encode_status(status: ReplicaStatus) -> bytes:
    """A status as a frame, after its length."""
    body = msgspec.msgpack.encode(status)
    return len(body).to_bytes(frames.HEAD, "little") + body


def read_status(body: bytes) -> ReplicaStatus:
    """The status in the body of a frame. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=ReplicaStatus)
