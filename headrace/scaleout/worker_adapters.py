"""Adapters that were loaded or unloaded through this frontend, kept the same on all workers."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from time import monotonic

from headrace.errors import NoReplicaError
from headrace.remote.errors import EngineError, RefusedError
from headrace.scaleout.http_worker import HttpWorker

_STATUS_SECONDS = 0.5
"""Seconds after which a status is newer than a change."""
_SETTLE_SECONDS = 5.0
"""Seconds after a change in which a worker's status may be older."""

log = logging.getLogger("headrace.scaleout")


class WorkerAdapters:
    def __init__(self) -> None:
        self._paths: dict[str, str | None] = {}
        """Path of each adapter; None: unloaded."""
        self._changed_at: dict[str, float] = {}
        self._equal_boots: dict[str, str] = {}
        """Boot id of each worker that has been made equal, by URL."""
        self._refused = set[tuple[str, str]]()
        """URL and adapter of workers that refuse a change."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def with_changes(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return the adapters of workers, with the changes that a worker may lack."""
        merged = {**found, **self._paths}
        return {name: path for name, path in merged.items() if path is not None}

    async def load(self, name: str, path: str, workers: Collection[HttpWorker]) -> None:
        """Load an adapter on all workers, or none. Raises RefusedError and NoReplicaError.

        A worker that is lost meanwhile loads it when it comes back.
        """
        lacking = [worker for worker in workers if name not in worker.last_adapters]
        if workers and not lacking:
            raise RefusedError(
                "request",
                f"adapter {name!r} is already loaded; unload it first or choose another name",
            )
        loaded: list[HttpWorker] = []
        reason = NoReplicaError("no worker is present")
        for worker in lacking:
            try:
                await _load(worker, name, path)
                loaded.append(worker)
            except NoReplicaError as error:
                reason = error
                self._equal_boots.pop(worker.url, None)
            except EngineError:
                for other in loaded:
                    await self._try_unload(other, name)
                raise
        if not loaded:
            raise reason
        self._paths[name], self._changed_at[name] = path, monotonic()

    async def unload(self, name: str, workers: Collection[HttpWorker]) -> None:
        """Unload an adapter. Raises RefusedError if no worker has it.

        A worker that is lost meanwhile unloads it when it comes back.
        """
        having = [worker for worker in workers if name in worker.last_adapters]
        if not having and not self._paths.get(name):
            raise RefusedError("request", f"unknown adapter {name!r}; no worker has it")
        self._paths[name], self._changed_at[name] = None, monotonic()
        for worker in having:
            await self._try_unload(worker, name)

    def observe(self, worker: HttpWorker) -> None:
        """Make a worker that has come back equal to the others."""
        status = worker.status
        if status is None or not self._paths or worker.url in self._tasks:
            return
        if self._equal_boots.get(worker.url) != status.boot_id:
            task = asyncio.ensure_future(self._make_equal(worker, status.boot_id))
            self._tasks[worker.url] = task
            task.add_done_callback(lambda _: self._tasks.pop(worker.url, None))
            return
        for name, path in list(self._paths.items()):
            is_settled = monotonic() - self._changed_at[name] > _SETTLE_SECONDS
            is_settled = is_settled and (worker.url, name) not in self._refused
            if is_settled and (name in status.adapters) != (path is not None):
                log.info("another client has changed adapter %r on %s", name, worker.url)
                del self._paths[name], self._changed_at[name]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try_unload(self, worker: HttpWorker, name: str) -> None:
        try:
            await _unload(worker, name)
        except (NoReplicaError, EngineError) as error:
            log.warning("%s has not unloaded adapter %r: %s", worker.url, name, error)
            self._equal_boots.pop(worker.url, None)

    async def _make_equal(self, worker: HttpWorker, boot_id: str) -> None:
        await asyncio.sleep(_STATUS_SECONDS)
        for name, path in list(self._paths.items()):
            has_it = name in worker.last_adapters
            self._refused.discard((worker.url, name))
            try:
                if path is not None and not has_it:
                    await _load(worker, name, path)
                    log.info("%s has loaded adapter %r again", worker.url, name)
                elif path is None and has_it:
                    await _unload(worker, name)
            except NoReplicaError:
                return  # the next status tries again
            except EngineError as error:
                log.error("%s cannot change adapter %r: %s", worker.url, name, error)
                self._refused.add((worker.url, name))
            self._changed_at[name] = monotonic()
        self._equal_boots[worker.url] = boot_id


async def _load(worker: HttpWorker, name: str, path: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    await worker.call("POST", "/v1/load_lora_adapter", body)
    worker.set_adapters({**worker.last_adapters, name: path})


async def _unload(worker: HttpWorker, name: str) -> None:
    await worker.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
    kept = {other: path for other, path in worker.last_adapters.items() if other != name}
    worker.set_adapters(kept)
