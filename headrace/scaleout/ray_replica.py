"""A replica: an engine in the process of an actor of Ray Serve, asked and answering in the frames that an engine process speaks."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from headrace.errors import HeadraceError
from headrace.scaleout.mailbox import Mailroom
from headrace.scaleout.ray_router import ReplicaFacts, metadata_of
from headrace.server import frames
from headrace.server.engine_host import EngineHost, open_engine


class UnhealthyError(HeadraceError):
    """The engine of a replica has ended, or stands still."""


class Replica:
    """Ray Serve makes one in each process, and calls its methods by their names."""

    async def __init__(self, setup: bytes, stall_seconds: float) -> None:
        """`setup`: a `frames.Setup`; `stall_seconds`: for how long a step may run before Ray is to replace the replica."""
        engine, spec = await asyncio.to_thread(open_engine, _setup_of(setup))
        self._mail = Mailroom()
        self._host = EngineHost(engine, spec, self._mail.put)
        self._stall_seconds = stall_seconds
        self._boot = secrets.token_hex(8)

    async def generate(self, asked: bytes) -> AsyncIterator[bytes]:
        """What comes of a `frames.Add`, a message for all that a step brings; it ends where its caller leaves."""
        command = _command_of(asked)
        self._mail.open(command.id)
        is_over = False
        try:
            await asyncio.to_thread(self._host.obey, command)  # to check it may take long
            async for events in self._mail.read(command.id):
                is_over = isinstance(events[-1], frames.Ended | frames.Refused)
                yield frames.encode(*events)
        finally:
            self._mail.close(command.id)
            if not is_over:
                self._host.obey(frames.Abort(command.id))

    async def command(self, asked: bytes) -> bytes:
        """The answer to any other command."""
        command = _command_of(asked)
        self._mail.open(command.id)
        try:
            await asyncio.to_thread(self._host.obey, command)
            async for events in self._mail.read(command.id):
                return frames.encode(events[0])
        finally:
            self._mail.close(command.id)
        raise AssertionError("a command has an answer")

    async def describe(self) -> bytes:
        """A `frames.Hello`."""
        return frames.encode(self._host.hello)

    async def report(self) -> bytes:
        """A `frames.Report`."""
        return frames.encode(await asyncio.to_thread(self._host.report))

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers are told of the replica, once."""
        limits = self._host.limits
        return metadata_of(ReplicaFacts(self._boot, limits.kv.block_size, max(limits.kv.num_blocks), self._host.cost))

    def check_health(self) -> None:
        """Raise UnhealthyError where Ray is to replace the replica."""
        thread = self._host.thread
        if thread.closed:
            raise UnhealthyError("the engine has ended")
        begun = thread.step_begun
        if begun is not None and monotonic() - begun > self._stall_seconds:
            raise UnhealthyError(f"a step has run for {monotonic() - begun:.0f} s")


def _setup_of(data: bytes) -> frames.Setup:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_setup(body)


def _command_of(data: bytes) -> frames.Command:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_command(body)
