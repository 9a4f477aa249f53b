"""Workers at URLs as a `Dispatcher`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing

import msgspec

from headrace.errors import NoReplicaError, ReplicasFullError, RequestError
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError, RefusedError
from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout.dispatcher import ReplicaLostError, RequestEvent
from headrace.scaleout.equal_workers import EqualWorkers
from headrace.scaleout.http_worker import HttpWorker
from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.replica_speed import ReplicaSpeed, SpeedEstimator
from headrace.scaleout.worker_adapters import WorkerAdapters

_PATIENCE_SECONDS = 10.0
_LATE_SECONDS = 5.0
"""Seconds until the loss of a worker is seen."""

log = logging.getLogger("headrace.scaleout")


class HttpWorkers:
    def __init__(
        self,
        urls: Iterable[str],
        key: str,
        fingerprint: Callable[[], str],
        wait_seconds: float = 30.0,
    ) -> None:
        """`fingerprint` identifies the required model; a thread calls it. `wait_seconds`: maximum
        wait of a request.
        """
        self._workers = {url: HttpWorker(url, key, self._observe) for url in urls}
        self._fingerprint = fingerprint
        self._model = ""
        self._equal = EqualWorkers("worker", wait_seconds + _LATE_SECONDS)
        self._adapters = WorkerAdapters()
        self._router: PrefixRouter | None = None
        self._speeds: dict[str, tuple[str, SpeedEstimator]] = {}
        self._common_speed = SpeedEstimator()
        self._watching: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        return {
            url: worker.status
            for url, worker in self._workers.items()
            if worker.status and not worker.problem
        }

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapters that a worker has, or had when it was lost."""
        found: dict[str, str] = {}
        for worker in self._workers.values():
            if not worker.problem:
                found = {**worker.last_adapters, **found}
        return self._adapters.with_changes(found)

    async def changed(self) -> None:
        await self._changed.wait()

    async def start(self) -> None:
        """Wait for a worker. Raises EngineDeadError if no worker is usable."""
        self._model = await asyncio.to_thread(self._fingerprint)
        self._watching = [
            asyncio.ensure_future(worker.watch()) for worker in self._workers.values()
        ]
        while not any(worker.accepts_requests for worker in self._workers.values()):
            problems = [worker.problem for worker in self._workers.values()]
            if all(problems):
                raise EngineDeadError("; ".join(problems))
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                log.info("waiting for a worker: %s", ", ".join(self._workers))

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        """Run a request on the worker with the earliest expected first token that accepts it."""
        adapter, tried = request.options.adapter, set[str]()
        while True:
            candidates = {
                worker.url
                for worker in self._having(adapter)
                if worker.url not in tried and worker.has_room(request.num_sequences)
            }
            routed = self._route(request, candidates)
            try:
                async with aclosing(self._run(request, routed)) as events:
                    async for event in events:
                        yield event
                return
            except NoReplicaError:
                tried.add(routed.replica)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._adapters.load(name, path, self._usable_workers())

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name, self._usable_workers())

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        workers = self._usable_workers()
        pages = await asyncio.gather(*(worker.call("GET", "/stats/blocks") for worker in workers))
        maps = [msgspec.json.decode(page, type=_BlocksPage) for page in pages]
        return {
            worker.url: frames.Blocks("", block_map.block_size, block_map.groups)
            for worker, block_map in zip(workers, maps, strict=True)
        }

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._adapters.close()

    def _usable_workers(self) -> list[HttpWorker]:
        return [self._workers[url] for url in self.replicas]

    def _having(self, adapter: str | None) -> list[HttpWorker]:
        """Workers that take requests and have an adapter, full or not."""
        return [
            worker
            for url, worker in self._workers.items()
            if worker.accepts_requests
            and worker.status is not None
            and (adapter is None or self._equal.has_adapter(url, worker.status, adapter))
        ]

    def _no_candidate(self, adapter: str | None) -> Exception:
        if adapter is not None and adapter not in self.adapters:
            return RefusedError("request", f"adapter {adapter!r} was unloaded")
        if workers := self._having(adapter):
            return ReplicasFullError(f"the queues of all {len(workers)} workers are full")
        what = "" if adapter is None else f" with adapter {adapter!r}"
        return NoReplicaError(f"no worker{what} can accept the request")

    def _route(self, request: frames.Add, candidates: Collection[str]) -> RoutedRequest:
        if self._router is None or not candidates:
            raise self._no_candidate(request.options.adapter)
        scope = request.options.cache_salt, request.options.adapter
        try:
            return self._router.route(request.known_tokens, scope, candidates)
        except RequestError as error:
            raise RefusedError("request", str(error)) from None

    async def _run(
        self, request: frames.Add, routed: RoutedRequest
    ) -> AsyncGenerator[RequestEvent]:
        router = self._router
        assert router is not None
        tokens = request.known_tokens
        cached_tokens: list[int] | None = None
        try:
            async with aclosing(self._workers[routed.replica].generate(request)) as events:
                async for event in events:
                    if isinstance(event, frames.StepOutput):
                        router.first_token(routed)
                        if event.index == 0:
                            tokens += event.token_ids
                    elif isinstance(event, frames.Ended):
                        cached_tokens = tokens
                    yield event
        except ReplicaLostError:
            router.failed(routed)
            raise
        finally:
            router.ended(routed, cached_tokens)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _observe(self, worker: HttpWorker, status: ReplicaStatus | None) -> None:
        self._notify()
        if status is None:
            if self._router:
                self._router.leave(worker.url)
            return

        last_problem, worker.problem = worker.problem, self._find_problem(worker, status)
        if worker.problem:
            if worker.problem != last_problem:
                log.error("%s", worker.problem)
            return

        self._equal.learn_adapters(self.replicas)
        self._adapters.observe(worker)
        info = status.info
        if self._router is None:
            self._router = PrefixRouter(info.block_size)
        self._router.join(
            worker.url,
            boot_id=status.boot_id,
            speed=self._speed(worker.url, status),
            max_blocks=max(1, info.kv_tokens // info.block_size),
        )

    def _speed(self, url: str, status: ReplicaStatus) -> ReplicaSpeed:
        boot_id, estimator = self._speeds.get(url, ("", SpeedEstimator()))
        if boot_id != status.boot_id:  # the URL may now be another machine
            estimator = SpeedEstimator()
        self._speeds[url] = status.boot_id, estimator
        estimator.observe(status.report)
        self._common_speed.observe(status.report)
        return estimator.estimate(status.info.max_num_seqs, self._common_speed)

    def _find_problem(self, worker: HttpWorker, status: ReplicaStatus) -> str:
        if status.model != self._model:
            return (
                f"{worker.url} serves another model or tokenizer: start it with the same MODEL as "
                "this process"
            )
        others = [status for url, status in self.replicas.items() if url != worker.url]
        differences = self._equal.differences(status, others)
        if not differences:
            return ""
        return f"{worker.url} differs from the first worker and is not used: {differences}"


class _BlocksPage(msgspec.Struct):
    block_size: int
    groups: list[frames.GroupBlocks]
