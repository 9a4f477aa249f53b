"""Replicas in this process: real engines over a tiny model in threads, which a test can kill."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from itertools import count

from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread
from headrace.errors import ClosedError, NoReplicaError, RequestError
from headrace.outputs import Update
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.host import blocks_of, ended_event, report_of
from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout.dispatcher import ReplicaLostError

_DELAY = 0.002
"""Seconds from the fleet to a replica."""

Event = frames.StepOutput | frames.Ended | BaseException


class Replica:
    """An engine that runs requests until it dies."""

    def __init__(self, boot_id: str, engine: Engine) -> None:
        self.boot_id = boot_id
        self.engine = engine
        self.thread = EngineThread(engine)
        self.queues: dict[str, asyncio.Queue[Event]] = {}

    def die(self) -> None:
        """Drop all events, also those already queued."""
        for queue in self.queues.values():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(ReplicaLostError(self.boot_id, "it died"))
        self.queues.clear()
        self.thread.close()


class _Sink:
    def __init__(self, replica: Replica, request_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._replica = replica
        self._id = request_id

    def put(self, item: Update | BaseException, /) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, item)

    def _put(self, item: Update | BaseException) -> None:
        queue = self._replica.queues.get(self._id)
        if queue is None:
            return
        if isinstance(item, BaseException):
            queue.put_nowait(ReplicaLostError(self._replica.boot_id, str(item)))
            return
        if item.token_ids or item.text or item.finish_reason:
            queue.put_nowait(
                frames.StepOutput(
                    id=self._id,
                    index=item.index,
                    text=item.text,
                    token_ids=item.token_ids,
                    logprobs=item.logprobs,
                    finish_reason=item.finish_reason,
                    stop_reason=item.stop_reason,
                )
            )
        if item.result:
            queue.put_nowait(ended_event(self._id, item.result))


class LocalReplicas:
    """A `Dispatcher` over replicas of this process, which take turns."""

    def __init__(self, make: Callable[[], Engine], number: int) -> None:
        self._make = make
        self._boot_ids = count()
        self._next = count()
        self.alive = [self._new_replica() for _ in range(number)]
        self.requests: list[frames.Add] = []
        """All requests to replicas."""
        self.on_event: Callable[
            [Replica, frames.Accepted | frames.StepOutput | frames.Ended], None
        ] = lambda replica, event: None
        """Called with each event before the fleet gets it; it may kill the replica."""

    def _new_replica(self) -> Replica:
        return Replica(f"boot-{next(self._boot_ids)}", self._make())

    def kill(self, replica: Replica, *, replace: bool = True) -> None:
        """Kill a replica, and start another in its place."""
        if replica in self.alive:
            self.alive.remove(replica)
            replica.die()
            if replace:
                self.alive.append(self._new_replica())

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        return {replica.boot_id: status_of(replica) for replica in self.alive}

    @property
    def adapters(self) -> Mapping[str, str]:
        return {}

    async def changed(self) -> None:
        await asyncio.sleep(_DELAY)

    async def start(self) -> None:
        return

    async def generate(
        self, request: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        self.requests.append(request)
        await asyncio.sleep(_DELAY)
        if not self.alive:
            raise NoReplicaError("none is alive")
        replica = self.alive[next(self._next) % len(self.alive)]
        try:
            checked = replica.engine.check(
                request.prompt_token_ids,
                request.params,
                request.options,
                pooling=request.pooling,
                output_token_ids=request.output_token_ids,
            )
        except RequestError as error:
            raise RefusedError("request", str(error)) from None
        queue = replica.queues[request.id] = asyncio.Queue[Event]()
        try:
            self._report(replica, frames.Accepted(request.id))
            yield frames.Accepted(request.id)
            with suppress(ClosedError):  # the replica died meanwhile
                replica.thread.add([checked], [request.id], _Sink(replica, request.id))
            while True:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                self._report(replica, event)
                yield event
                if isinstance(event, frames.Ended):
                    return
        finally:
            replica.queues.pop(request.id, None)
            replica.thread.abort([request.id])

    def _report(
        self, replica: Replica, event: frames.Accepted | frames.StepOutput | frames.Ended
    ) -> None:
        self.on_event(replica, event)
        if replica not in self.alive:
            raise ReplicaLostError(replica.boot_id, "it died with this event")

    async def load_adapter(self, name: str, path: str) -> None:
        raise RefusedError("request", f"there is no adapter {path}")

    async def unload_adapter(self, name: str) -> None:
        raise RefusedError("request", f"there is no adapter {name}")

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        return {
            replica.boot_id: blocks_of(
                "", await asyncio.to_thread(replica.thread.call, replica.engine.block_map)
            )
            for replica in self.alive
        }

    async def close(self) -> None:
        for replica in self.alive:
            replica.thread.close()


def status_of(replica: Replica) -> ReplicaStatus:
    limits = replica.engine.limits
    info = frames.EngineInfo(
        architecture="llama",
        vocab_size=limits.vocab_size,
        dim=32,
        max_model_len=limits.max_model_len,
        max_num_seqs=replica.engine.config.max_seqs,
        kv_tokens=max(limits.kv.num_blocks) * limits.kv.block_size,
        kv_bytes=1000,
        weight_bytes=2000,
        kv_dtype=limits.kv.dtype,
        threads=1,
        backend="reference",
        lossy="",
        activations="int8",
        block_size=limits.kv.block_size,
    )
    report = report_of(replica.thread.call(replica.engine.stats))
    return ReplicaStatus(
        boot_id=replica.boot_id,
        state="ready",
        draining=False,
        info=info,
        report=report,
        adapters={},
        restarts=0,
        step_seconds=0.0,
    )
