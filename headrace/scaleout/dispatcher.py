"""What a fleet is made over: something that has replicas, chooses one for each request, and hands
back what comes of it.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from headrace.remote import frames
from headrace.remote.errors import EngineError
from headrace.remote.replica_status import ReplicaStatus


class ReplicaLostError(EngineError):
    """The replica that ran a request went away before its end."""

    def __init__(self, boot_id: str, why: str) -> None:
        """`boot_id`: the replica's, so that no two deaths are taken for one, nor one for two; empty
        where it never took the request.
        """
        super().__init__(why)
        self.boot_id = boot_id


class Dispatcher(Protocol):
    """Replicas of one model. Which of them runs a request makes no difference to what comes
    of it.
    """

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """Those that are there, by name, as they last said."""

    async def start(self) -> None:
        """Find the replicas, and return once one takes requests. Raises EngineDeadError, with the
        reason, where that cannot be.
        """

    def generate(
        self, asked: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        """Run a request on some replica, from the tokens on that its outputs have already;
        `Accepted` comes first, `Ended` last.

        Leaving the iterator ends the request. The id of the request is unique among those under
        way, and stands in all that comes. Raises RefusedError for what the replica cannot serve,
        NoReplicaError where none can take it now, and ReplicaLostError where its replica goes away
        or does not answer, be it within seconds of the last word of it.
        """

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all replicas. Raises RefusedError where one of them cannot,
        NoReplicaError where one does not answer.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all replicas. Raises as `load_adapter` does."""

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        """Which request holds which blocks, of each replica. Raises NoReplicaError where one does
        not answer.
        """

    async def close(self) -> None:
        """Let go of the replicas, and of all requests."""
