"""Protocol between a fleet and its replicas."""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from headrace.remote import frames
from headrace.remote.errors import EngineError
from headrace.remote.replica_status import ReplicaStatus

RequestEvent = frames.Accepted | frames.StepOutput | frames.Ended


class ReplicaLostError(EngineError):
    def __init__(self, boot_id: str, reason: str) -> None:
        """`boot_id` names the dead replica; empty if the request cannot have caused the loss."""
        super().__init__(reason)
        self.boot_id = boot_id


class Dispatcher(Protocol):
    """Replicas that all give the same tokens for a request."""

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Paths of the adapters that requests may name, by name."""

    async def changed(self) -> None:
        """Wait until a replica may accept a request that none has accepted before."""

    async def start(self) -> None:
        """Find the replicas; return when one accepts requests. Raises EngineDeadError."""

    def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        """Run a request on a replica; yields `Accepted` first and `Ended` last.

        It continues after its `output_token_ids`. Closing the iterator aborts it.

        Raises RefusedError, NoReplicaError if no replica can accept it now, ReplicaLostError.
        """

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all replicas. Raises RefusedError and NoReplicaError."""

    async def unload_adapter(self, name: str) -> None: ...

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        """Return the KV blocks of each replica. Raises NoReplicaError."""

    async def close(self) -> None: ...
