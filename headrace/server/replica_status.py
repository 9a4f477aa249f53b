"""What a replica says of itself to the frontend that sends it requests, again and again."""

import msgspec

from headrace.server import frames
from headrace.server.served_engine import State


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is now. One that says nothing for some seconds has no pulse."""

    boot: str
    """Made up at its start: another one has none of the KV that this one had."""
    state: State
    draining: bool
    """Whether it takes no more requests, and ends once those under way have ended."""
    hello: frames.Hello
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
