"""A replica: an engine in the process of an actor of Ray Serve, asked and answering in the frames
that an engine process speaks.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.fingerprint import fingerprint
from headrace.config import EngineConfig
from headrace.errors import ClosedError, HeadraceError
from headrace.loader.load import open_model
from headrace.parallel.config import mesh_of
from headrace.remote import frames
from headrace.remote.host import EngineHost, open_engine
from headrace.remote.replica_status import ReplicaStatus, encode_status
from headrace.scaleout.mailbox import Mailroom
from headrace.scaleout.ray_router import ReplicaFacts, metadata_of

_REPORT = 0.2
"""Seconds that a status waits for the engine; then it has the last report."""

if TYPE_CHECKING:
    from headrace.scaleout.ray_ranks import RayRanks


class UnhealthyError(HeadraceError):
    """The engine of a replica has ended, or stands still."""


class Replica:
    """Ray Serve makes one in each process, and calls its methods by their names."""

    def __init__(self, setup: bytes, stall_seconds: float) -> None:
        """`setup`: a `frames.Setup`; `stall_seconds`: for how long a step may run before Ray is to
        replace the replica.

        Ray calls it in the event loop that calls all else, and nothing else before its end.
        """
        asked = _setup_of(setup)
        self._ranks = _ranks_of(asked.config)
        engine, spec = open_engine(asked, self._ranks.launcher if self._ranks else None)
        self._mail = Mailroom()
        self._host = EngineHost(engine, spec, self._mail.put)
        self._model = fingerprint_of(asked.model, asked.config)
        self._stall_seconds = stall_seconds
        self._boot_id = secrets.token_hex(8)
        self._adapters = dict(asked.adapters)
        self._report = frames.Report({}, {}, {})
        self._reporting: asyncio.Future[None] | None = None

    async def generate(self, asked: bytes) -> AsyncIterator[bytes]:
        """What comes of a `frames.Add`, a message for all that a step brings; it ends where its
        caller leaves.
        """
        command = _command_of(asked)
        self._mail.open(command.id)
        is_over = False
        try:
            await asyncio.to_thread(self._host.handle, command)  # to check it may take long
            async for events in self._mail.read(command.id):
                is_over = isinstance(events[-1], frames.Ended | frames.Refused)
                yield frames.encode(*events)
        finally:
            self._mail.close(command.id)
            if not is_over:
                self._host.handle(frames.Abort(command.id))

    async def command(self, asked: bytes) -> bytes:
        """The answer to any other command."""
        command = _command_of(asked)
        self._mail.open(command.id)
        try:
            await asyncio.to_thread(self._host.handle, command)
            async for events in self._mail.read(command.id):
                match events[0], command:
                    case frames.Accepted(), frames.LoadAdapter(_, name, path):
                        self._adapters[name] = path
                    case frames.Accepted(), frames.UnloadAdapter(_, name):
                        self._adapters.pop(name, None)
                return frames.encode(events[0])
        finally:
            self._mail.close(command.id)
        raise AssertionError("a command has an answer")

    async def status(self) -> bytes:
        """A `ReplicaStatus`, in msgpack."""
        thread, begun = self._host.thread, self._host.thread.step_started
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.ensure_future(self._take_report())
        await asyncio.wait(
            [self._reporting], timeout=_REPORT
        )  # a step that takes longer holds up no status
        status = ReplicaStatus(
            boot_id=self._boot_id,
            state="dead" if thread.closed else "ready",
            draining=False,  # Ray sends it no more then
            info=self._host.info,
            report=self._report,
            adapters=self._adapters,
            restarts=0,
            step_seconds=0.0 if begun is None else monotonic() - begun,
            model=self._model,
        )
        return encode_status(status)

    async def _take_report(self) -> None:
        with suppress(ClosedError):
            self._report = await asyncio.to_thread(self._host.report)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers are told of the replica, once it is ready."""
        engine = self._host.engine
        kv = engine.limits.kv
        return metadata_of(
            ReplicaFacts(self._boot_id, kv.block_size, max(kv.num_blocks), engine.config.max_seqs)
        )

    def check_health(self) -> None:
        """Raise UnhealthyError where Ray is to replace the replica."""
        thread = self._host.thread
        if thread.closed:
            raise UnhealthyError("the engine has ended")
        begun = thread.step_started
        if begun is not None and monotonic() - begun > self._stall_seconds:
            raise UnhealthyError(f"a step has run for {monotonic() - begun:.0f} s")


def _ranks_of(config: EngineConfig) -> "RayRanks | None":
    """The other ranks, in the bundles of this replica; None where there is but one."""
    mesh = mesh_of(config)
    if mesh.ranks == 1:
        return None
    from headrace.scaleout.ray_ranks import RayRanks

    return RayRanks(mesh.ranks, config.threads)


def fingerprint_of(model: str, config: EngineConfig) -> str:
    """By which a frontend and its replicas know whether they have the same model and tokenizer.
    Raises as `open_model`.
    """
    checkpoint = open_model(model, config)
    return fingerprint(checkpoint, checkpoint.load_tokenizer())


def _setup_of(data: bytes) -> frames.Setup:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_setup(body)


def _command_of(data: bytes) -> frames.Command:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_command(body)
