"""Many replicas as one engine. A request of a lost replica continues on another replica.

Every request gets a seed, so that all replicas sample the same tokens.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from itertools import count
from time import monotonic

import msgspec

from headrace.errors import NoReplicaError, ReplicasFullError
from headrace.remote import frames
from headrace.remote.engine import State
from headrace.remote.errors import EngineDeadError, EngineError, NotReadyError
from headrace.remote.quarantine import request_key
from headrace.remote.replica_status import ReplicaStatus
from headrace.remote.stream import Stream
from headrace.sampling.sampler import random_seed
from headrace.scaleout.aggregate import ReportTotals, combine_blocks, combine_info
from headrace.scaleout.dispatcher import Dispatcher, ReplicaLostError, RequestEvent
from headrace.scaleout.fleet_quarantine import FleetQuarantine
from headrace.scaleout.resumable_request import ResumableRequest, with_seed
from headrace.scaleout.waiting_line import WaitingLines

_MAX_LOSSES = 8

log = logging.getLogger("headrace.scaleout")


class Fleet:
    exit_code = 1

    def __init__(
        self, dispatcher: Dispatcher, seed: int | None = 0, wait_seconds: float = 30.0
    ) -> None:
        """`seed`: base seed of requests without one, or None for a random one; `wait_seconds`:
        maximum wait of a request for a replica.
        """
        self._dispatcher = dispatcher
        self._seed = random_seed() if seed is None else seed
        self._wait_seconds = wait_seconds
        self._numbers = count()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lines = WaitingLines()
        self._waking: asyncio.Task[None] | None = None
        self._quarantine = FleetQuarantine()
        self._totals = ReportTotals()
        self._last_replicas: list[ReplicaStatus] = []
        self._closed = False

    @property
    def info(self) -> frames.EngineInfo | None:
        replicas = self._present_or_last()
        return combine_info(replicas) if replicas else None

    @property
    def report(self) -> frames.Report:
        return self._totals.report(self._dispatcher.replicas.values())

    @property
    def state(self) -> State:
        """`ready` if a replica accepts requests; `stalled` if one did before."""
        if self._closed:
            return "closed"
        if any(replica.accepts_requests for replica in self._dispatcher.replicas.values()):
            return "ready"
        return "stalled" if self._last_replicas else "loading"

    @property
    def ready(self) -> bool:
        return self.state in ("ready", "stalled")

    @property
    def step_seconds(self) -> float:
        replicas = self._dispatcher.replicas.values()
        return max((replica.step_seconds for replica in replicas), default=0.0)

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self._dispatcher.replicas.values())

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._dispatcher.adapters

    @property
    def adapter_digests(self) -> Mapping[str, str]:
        return {
            name: digest
            for replica in self._present_or_last()
            for name, digest in replica.adapter_digests.items()
        }

    async def start(self) -> None:
        await self._dispatcher.start()
        self._present_or_last()

    async def submit(self, request: frames.Add) -> Stream:
        if self._closed:
            raise NotReadyError("closed", "the server is shutting down")
        number = next(self._numbers)
        # The mark comes before the seed, by which no two requests would be equal.
        request = msgspec.structs.replace(request, id=str(number), mark=request_key(request))
        stream = Stream(request.id, request, self._abort)
        seeded = with_seed(request, self._seed, number)
        self._running[request.id] = asyncio.ensure_future(self._run(seeded, stream))
        try:
            await stream.reply()
        except BaseException:
            stream.close()
            self._abort(request.id)
            raise
        return stream

    has_sessions = False

    def release(self, names: Iterable[str]) -> None:
        """Do nothing: no replica keeps paths."""

    def release_all(self, prefix: str) -> None:
        """Do nothing: no replica keeps paths."""

    async def load_adapter(self, name: str, path: str) -> None:
        with _not_ready_without_replica():
            await self._dispatcher.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        with _not_ready_without_replica():
            await self._dispatcher.unload_adapter(name)

    async def block_map(self) -> frames.Blocks:
        with _not_ready_without_replica():
            return combine_blocks(await self._dispatcher.block_maps())

    async def close(self) -> None:
        self._closed = True
        running = list(self._running.values())
        for task in (*running, *filter(None, [self._waking])):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._dispatcher.close()

    def _present_or_last(self) -> list[ReplicaStatus]:
        self._last_replicas = list(self._dispatcher.replicas.values()) or self._last_replicas
        return self._last_replicas

    def _abort(self, request_id: str) -> None:
        if task := self._running.pop(request_id, None):
            task.cancel()

    async def _run(self, request: frames.Add, stream: Stream) -> None:
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    stream.put(event)
        except EngineError as error:
            stream.put(error)
        except asyncio.CancelledError:
            if self._closed:
                stream.put(NotReadyError("closed", "the server is shutting down"))
            raise
        except Exception as error:
            log.error("a request failed in the fleet", exc_info=error)
            stream.put(EngineDeadError(f"{type(error).__name__}: {error}"))
        finally:
            self._running.pop(request.id, None)

    async def _events(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        resumable, is_accepted = ResumableRequest(request), False
        while True:
            try:
                async with aclosing(self._accepted_events(resumable, request)) as events:
                    async for event in events:
                        match event:
                            case frames.Accepted():
                                if not is_accepted:
                                    yield event
                                is_accepted = True
                            case frames.StepOutput():
                                if output := resumable.receive(event):
                                    yield output
                            case frames.Ended(error=frames.Refused(kind="closed", message=reason)):
                                raise ReplicaLostError("", reason)
                            case frames.Ended():
                                self._quarantine.finished(request)
                                yield resumable.with_total_times(event)
                                return
                    raise ReplicaLostError("", "the response ended early")
            except ReplicaLostError as error:
                self._note_loss(resumable, request, error)
                if ended := resumable.end_without_replica():
                    yield ended
                    return

    async def _accepted_events(
        self, resumable: ResumableRequest, request: frames.Add
    ) -> AsyncGenerator[RequestEvent]:
        """Yield the events of the replica that accepts a request, which waits in line for it."""
        options, reason = request.options, None
        async with self._quarantine.admit(request, resumable.seconds_left):
            if not self._lines.has_line(options.adapter):
                try:
                    async with aclosing(self._dispatcher.generate(resumable.remaining())) as events:
                        async for event in events:
                            yield event
                    return
                except NoReplicaError as error:
                    reason = error

            wait_seconds = self._max_wait(resumable)
            deadline = monotonic() + wait_seconds
            with ExitStack() as waiting:
                place = waiting.enter_context(
                    self._lines.waiting(options.adapter, options.priority, int(request.id))
                )
                self._start_waking()
                while True:
                    try:
                        await self._lines.turn(
                            options.adapter, place, deadline - monotonic(), reason
                        )
                    except NoReplicaError as error:
                        raise _not_ready(error, wait_seconds) from None
                    try:
                        async with aclosing(
                            self._dispatcher.generate(resumable.remaining())
                        ) as events:
                            async for event in events:
                                waiting.close()  # it is accepted, so the next one tries
                                yield event
                        return
                    except NoReplicaError as error:
                        reason = error

    def _max_wait(self, resumable: ResumableRequest) -> float:
        left = resumable.seconds_left
        return self._wait_seconds if left is None else min(self._wait_seconds, left)

    def _start_waking(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._wake_waiting())

    async def _wake_waiting(self) -> None:
        while not self._lines.is_empty:
            await self._dispatcher.changed()
            self._lines.wake()

    def _note_loss(
        self, resumable: ResumableRequest, request: frames.Add, error: ReplicaLostError
    ) -> None:
        resumable.losses += 1
        if error.boot_id:
            self._quarantine.replica_died(request, error.boot_id)
        if resumable.losses > _MAX_LOSSES:
            raise EngineDeadError(
                f"{resumable.losses} replicas were lost during the request; the last one: {error}"
            ) from None
        log.warning("a replica was lost; its request continues on another one: %s", error)


def _not_ready(error: NoReplicaError, seconds: float) -> NotReadyError:
    state = "full" if isinstance(error, ReplicasFullError) else "no_replica"
    return NotReadyError(state, f"{error}, and the request has waited {seconds:.0f} s")


@contextmanager
def _not_ready_without_replica() -> Iterator[None]:
    try:
        yield
    except NoReplicaError as error:
        raise NotReadyError("no_replica", str(error)) from None
