"""A replica on Ray Serve: an engine in an actor."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.fingerprint import fingerprint, weights_digest
from headrace.config import EngineConfig
from headrace.errors import ClosedError, HeadraceError
from headrace.loader.load import open_model
from headrace.parallel.config import mesh_of
from headrace.remote import frames
from headrace.remote.host import EngineHost, open_engine
from headrace.remote.replica_status import ReplicaStatus, encode_status
from headrace.scaleout.event_queues import EventQueues
from headrace.scaleout.ray_router import ReplicaMetadata

if TYPE_CHECKING:
    from headrace.scaleout.ray_ranks import RayRanks

_REPORT_SECONDS = 0.2
"""Seconds that a status waits for a new report."""


class UnhealthyError(HeadraceError): ...


class Replica:
    def __init__(self, setup: bytes, stall_seconds: float) -> None:
        """`setup`: an encoded `frames.Setup`; `stall_seconds`: maximum duration of a step."""
        decoded = _decode_setup(setup)
        self._ranks = _start_ranks(decoded.config)
        opened = open_engine(decoded, self._ranks.launcher if self._ranks else None)
        self._queues = EventQueues()
        self._host = EngineHost(opened, self._queues.put)
        self._model = fingerprint_of(decoded.model, decoded.config)
        self._stall_seconds = stall_seconds
        self._boot_id = secrets.token_hex(8)
        self._weights = weights_of(decoded.model, decoded.config)
        self._adapters = dict(decoded.adapters)
        self._adapter_digests = dict(opened.adapters)
        self._report = frames.Report({}, {}, {})
        self._reporting: asyncio.Future[None] | None = None

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        """Run an encoded `frames.Add`; yields encoded events. Closing the iterator aborts it."""
        command = _decode_command(request)
        self._queues.open(command.id)
        is_over = False
        try:
            # Checking a long prompt takes time, so it runs in a thread.
            await asyncio.to_thread(self._host.handle, command)
            async for events in self._queues.read(command.id):
                is_over = isinstance(events[-1], frames.Ended | frames.Refused)
                yield frames.encode(*events)
        finally:
            self._queues.close(command.id)
            if not is_over:
                self._host.handle(frames.Abort(command.id))

    async def command(self, encoded: bytes) -> bytes:
        command = _decode_command(encoded)
        self._queues.open(command.id)
        try:
            await asyncio.to_thread(self._host.handle, command)
            async for events in self._queues.read(command.id):
                match events[0], command:
                    case frames.Accepted(_, digest), frames.LoadAdapter(_, name, path):
                        self._adapters[name], self._adapter_digests[name] = path, digest
                    case frames.Accepted(), frames.UnloadAdapter(_, name):
                        self._adapters.pop(name, None)
                        self._adapter_digests.pop(name, None)
                return frames.encode(events[0])
        finally:
            self._queues.close(command.id)
        raise AssertionError("a command has a reply")

    async def status(self) -> bytes:
        thread, step_started = self._host.thread, self._host.thread.step_started
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.ensure_future(self._update_report())
        # A report waits for the step; the status does not.
        await asyncio.wait([self._reporting], timeout=_REPORT_SECONDS)
        status = ReplicaStatus(
            boot_id=self._boot_id,
            state="dead" if thread.closed else "ready",
            draining=False,  # Ray sends no requests to a draining replica
            info=self._host.info,
            report=self._report,
            adapters=self._adapters,
            restarts=0,
            step_seconds=0.0 if step_started is None else monotonic() - step_started,
            model=self._model,
            weights=self._weights,
            adapter_digests=self._adapter_digests,
        )
        return encode_status(status)

    async def _update_report(self) -> None:
        with suppress(ClosedError):
            self._report = await asyncio.to_thread(self._host.report)

    def record_replica_metadata(self) -> dict[str, Any]:
        engine = self._host.engine
        kv = engine.limits.kv
        return ReplicaMetadata(
            boot_id=self._boot_id,
            block_size=kv.block_size,
            num_blocks=max(kv.num_blocks),
            max_num_seqs=engine.config.max_seqs,
        ).encode()

    def check_health(self) -> None:
        thread = self._host.thread
        if thread.closed:
            raise UnhealthyError("the engine has ended")
        step_started = thread.step_started
        if step_started is not None and monotonic() - step_started > self._stall_seconds:
            raise UnhealthyError(f"a step has run for {monotonic() - step_started:.0f} s")


def _start_ranks(config: EngineConfig) -> "RayRanks | None":
    mesh = mesh_of(config)
    if mesh.ranks == 1:
        return None
    from headrace.scaleout.ray_ranks import RayRanks

    return RayRanks(mesh.ranks, config.threads)


def fingerprint_of(model: str, config: EngineConfig) -> str:
    checkpoint = open_model(model, config)
    return fingerprint(checkpoint, checkpoint.load_tokenizer())


def weights_of(model: str, config: EngineConfig) -> str:
    return weights_digest(open_model(model, config))


def _decode_setup(data: bytes) -> frames.Setup:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_setup(body)


def _decode_command(data: bytes) -> frames.Command:
    (body,) = frames.bodies(bytearray(data))
    return frames.read_command(body)
