"""Workers at URLs as the replicas of a fleet: a `Dispatcher` that sends each request where it is
expected to begin soonest.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing

import msgspec

from headrace.errors import NoReplicaError, RequestError
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError, RefusedError
from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout.dispatcher import ReplicaLostError
from headrace.scaleout.http_worker import HttpWorker
from headrace.scaleout.policy import PrefixRouter, Routed, StepCost
from headrace.scaleout.step_times import StepTimes

_ALIKE = (
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
"""What workers must say alike of themselves, so that a request can go on at any of them to the same
tokens.
"""
_PATIENCE = 10.0
"""Seconds after which it is said what is waited for."""

log = logging.getLogger("headrace.scaleout")


class HttpWorkers:
    """Workers that come and go."""

    def __init__(self, urls: Iterable[str], key: str, fingerprint: Callable[[], str]) -> None:
        """`key`: what their routes need, if anything; `fingerprint`: of the model that they must
        have, called in a thread.
        """
        self._workers = {url: HttpWorker(url, key, self._hear) for url in urls}
        self._fingerprint = fingerprint
        self._model = ""
        self._alike: dict[str, object] | None = None
        """What the first worker said of `_ALIKE`."""
        self._router: PrefixRouter | None = None
        self._times: dict[str, tuple[str, StepTimes]] = {}
        """Of the boot_id of each worker."""
        self._common = StepTimes()
        self._watching: list[asyncio.Task[None]] = []
        self._heard = asyncio.Event()

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """Workers that are there and fit, by URL."""
        return {
            url: worker.status
            for url, worker in self._workers.items()
            if worker.status and not worker.problem
        }

    async def start(self) -> None:
        """Wait for a worker that takes requests, for as long as it takes; the others may come
        later.

        Raises EngineDeadError where there is none, and one of them can never be.
        """
        self._model = await asyncio.to_thread(self._fingerprint)
        self._watching = [
            asyncio.ensure_future(worker.watch()) for worker in self._workers.values()
        ]
        while not any(worker.accepts_requests for worker in self._workers.values()):
            problems = [worker.problem for worker in self._workers.values() if worker.problem]
            if problems and all(worker.tried for worker in self._workers.values()):
                raise EngineDeadError("; ".join(problems))
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._heard.wait()
            except TimeoutError:
                log.info("none of the workers is ready yet: %s", ", ".join(self._workers))
            self._heard.clear()

    async def generate(
        self, asked: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        """Run a request on the worker that is expected to begin soonest, or on the next if that
        takes no more now.
        """
        left = {url for url, worker in self._workers.items() if worker.accepts_requests}
        while True:
            routed = self._route(asked, left)
            try:
                async with aclosing(self._run(asked, routed)) as events:
                    async for event in events:
                        yield event
                return
            except NoReplicaError:
                left.remove(routed.replica)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all workers, each of which must find it at this path."""
        for worker in self._there():
            assert worker.status is not None
            if name not in worker.status.adapters:
                await worker.ask(
                    "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}
                )
                worker.know(adapters=worker.status.adapters | {name: path})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all workers."""
        for worker in self._there():
            await worker.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            assert worker.status is not None
            worker.know(
                adapters={one: path for one, path in worker.status.adapters.items() if one != name}
            )

    async def block_maps(self) -> Mapping[str, frames.Blocks]:
        """Of all workers, by URL."""
        workers = self._there()
        answers = await asyncio.gather(*(worker.ask("GET", "/stats/blocks") for worker in workers))
        read = [msgspec.json.decode(answer, type=_BlocksPage) for answer in answers]
        return {
            worker.url: frames.Blocks("", page.block_size, page.groups)
            for worker, page in zip(workers, read, strict=True)
        }

    async def close(self) -> None:
        """Close all connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def _there(self) -> list[HttpWorker]:
        return [self._workers[url] for url in self.replicas]

    def _route(self, asked: frames.Add, among: Iterable[str]) -> Routed:
        if self._router is None:
            raise NoReplicaError("no worker is there")
        known = asked.prompt_token_ids + (
            asked.output_token_ids[0] if asked.output_token_ids else []
        )
        try:
            scope = asked.options.cache_salt, asked.options.adapter
            return self._router.route(known, scope, among)
        except RequestError as error:
            raise RefusedError("request", str(error)) from None

    async def _run(
        self, asked: frames.Add, routed: Routed
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        """Run a request on the worker that was chosen, and tell the router how it goes."""
        router = self._router
        assert router is not None
        tokens, held = (
            asked.prompt_token_ids + (asked.output_token_ids[0] if asked.output_token_ids else []),
            None,
        )
        try:
            async with aclosing(self._workers[routed.replica].generate(asked)) as events:
                async for event in events:
                    if isinstance(event, frames.StepOutput):
                        router.first_token(routed)
                        tokens = tokens + event.token_ids if event.index == 0 else tokens
                    elif isinstance(event, frames.Ended):
                        held = tokens
                    yield event
        except ReplicaLostError:
            router.failed(routed)
            raise
        finally:
            router.ended(routed, held)

    def _hear(self, worker: HttpWorker, status: ReplicaStatus | None) -> None:
        """A worker has said how it is, or is not there."""
        self._heard.set()
        if status is None:
            if self._router:
                self._router.leave(worker.url)
            return
        before, worker.problem = worker.problem, self._problem(worker.url, status)
        if worker.problem:
            if worker.problem != before:
                log.error("%s", worker.problem)
            return
        if self._router is None:
            self._router = PrefixRouter(status.info.block_size)
        cost = self._cost(worker.url, status)
        self._router.join(
            worker.url,
            status.boot_id,
            cost,
            max(1, status.info.kv_tokens // status.info.block_size),
        )

    def _cost(self, url: str, status: ReplicaStatus) -> StepCost:
        """What a step of a worker takes, by all that it and the others have said."""
        boot_id, times = self._times.get(url, ("", StepTimes()))
        if boot_id != status.boot_id:  # it may be another machine
            times = StepTimes()
        self._times[url] = status.boot_id, times
        times.observe(status.report)
        self._common.observe(status.report)
        return times.cost(status.info.max_num_seqs, self._common)

    def _problem(self, url: str, status: ReplicaStatus) -> str:
        """Why a worker cannot be used; empty where it can."""
        if status.model != self._model:
            return (
                f"{url} serves another model or tokenizer: start it with the same MODEL as "
                "this process"
            )
        said = {name: getattr(status.info, name) for name in _ALIKE}
        self._alike = self._alike or said
        other = [
            f"{name} {said[name]!r}, not {value!r}"
            for name, value in self._alike.items()
            if said[name] != value
        ]
        return (
            f"{url} computes otherwise than the first worker, so it is not used: it has "
            f"{', '.join(other)}"
            if other
            else ""
        )


class _BlocksPage(msgspec.Struct):
    """What `/stats/blocks` answers."""

    block_size: int
    groups: list[frames.GroupBlocks]
