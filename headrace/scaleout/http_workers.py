"""Workers at URLs as a `Dispatcher`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing

import msgspec

from headrace.errors import NoReplicaError, RequestError
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError, RefusedError
from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout.dispatcher import ReplicaLostError, RequestEvent
from headrace.scaleout.http_worker import HttpWorker
from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.replica_speed import ReplicaSpeed, SpeedEstimator

_EQUAL_INFO = (
    "architecture",
    "vocab_size",
    "dim",
    "max_model_len",
    "kv_dtype",
    "backend",
    "lossy",
    "activations",
    "block_size",
)
"""Properties that all workers must share, so that any of them gives the same tokens."""
_PATIENCE_SECONDS = 10.0

log = logging.getLogger("headrace.scaleout")


class HttpWorkers:
    def __init__(self, urls: Iterable[str], key: str, fingerprint: Callable[[], str]) -> None:
        """`fingerprint` identifies the required model; a thread calls it."""
        self._workers = {url: HttpWorker(url, key, self._observe) for url in urls}
        self._fingerprint = fingerprint
        self._model = ""
        self._first_info: dict[str, object] | None = None
        self._router: PrefixRouter | None = None
        self._speeds: dict[str, tuple[str, SpeedEstimator]] = {}
        self._common_speed = SpeedEstimator()
        self._watching: list[asyncio.Task[None]] = []
        self._status_changed = asyncio.Event()

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        return {
            url: worker.status
            for url, worker in self._workers.items()
            if worker.status and not worker.problem
        }

    async def start(self) -> None:
        """Wait for a worker. Raises EngineDeadError if no worker is usable."""
        self._model = await asyncio.to_thread(self._fingerprint)
        self._watching = [
            asyncio.ensure_future(worker.watch()) for worker in self._workers.values()
        ]
        while not any(worker.accepts_requests for worker in self._workers.values()):
            problems = [worker.problem for worker in self._workers.values() if worker.problem]
            if problems and all(worker.was_tried for worker in self._workers.values()):
                raise EngineDeadError("; ".join(problems))
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._status_changed.wait()
            except TimeoutError:
                log.info("waiting for a worker: %s", ", ".join(self._workers))
            self._status_changed.clear()

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        """Run a request on the worker with the earliest expected first token that accepts it."""
        candidates = {url for url, worker in self._workers.items() if worker.accepts_requests}
        while True:
            routed = self._route(request, candidates)
            try:
                async with aclosing(self._run(request, routed)) as events:
                    async for event in events:
                        yield event
                return
            except NoReplicaError:
                candidates.remove(routed.replica)

    async def load_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        for worker in self._usable_workers():
            assert worker.status is not None
            if name not in worker.status.adapters:
                await worker.call("POST", "/v1/load_lora_adapter", body)
                worker.set_adapters({**worker.status.adapters, name: path})

    async def unload_adapter(self, name: str) -> None:
        for worker in self._usable_workers():
            await worker.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            assert worker.status is not None
            kept = {other: path for other, path in worker.status.adapters.items() if other != name}
            worker.set_adapters(kept)

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

    def _usable_workers(self) -> list[HttpWorker]:
        return [self._workers[url] for url in self.replicas]

    def _route(self, request: frames.Add, candidates: Iterable[str]) -> RoutedRequest:
        if self._router is None:
            raise NoReplicaError("no worker is present")
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

    def _observe(self, worker: HttpWorker, status: ReplicaStatus | None) -> None:
        self._status_changed.set()
        if status is None:
            if self._router:
                self._router.leave(worker.url)
            return

        last_problem, worker.problem = worker.problem, self._find_problem(worker.url, status)
        if worker.problem:
            if worker.problem != last_problem:
                log.error("%s", worker.problem)
            return

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

    def _find_problem(self, url: str, status: ReplicaStatus) -> str:
        if status.model != self._model:
            return (
                f"{url} serves another model or tokenizer: start it with the same MODEL as "
                "this process"
            )
        info = {name: getattr(status.info, name) for name in _EQUAL_INFO}
        self._first_info = self._first_info or info
        differences = [
            f"{name} {info[name]!r}, not {value!r}"
            for name, value in self._first_info.items()
            if info[name] != value
        ]
        if not differences:
            return ""
        return f"{url} differs from the first worker and is not used: {', '.join(differences)}"


class _BlocksPage(msgspec.Struct):
    block_size: int
    groups: list[frames.GroupBlocks]
