"""Adapters that are changed through a frontend, on workers that refuse, vanish and come back."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headrace.errors import NoReplicaError
from headrace.remote.errors import RefusedError
from headrace.scaleout import worker_adapters
from headrace.scaleout.dispatcher import ReplicaLostError
from headrace.scaleout.http_worker import HttpWorker
from headrace.scaleout.worker_adapters import WorkerAdapters
from tests.scaleout.test_proxy import STATUS


class Worker(HttpWorker):
    """A worker whose routes are methods: an error, or the change of its adapters."""

    def __init__(self, name: str) -> None:
        super().__init__(f"http://{name}", "", lambda *_: None)
        self.error: Exception | None = None
        self.start_again("1")

    def start_again(self, boot_id: str, **adapters: str) -> None:
        self.status = msgspec.structs.replace(STATUS, boot_id=boot_id, adapters=adapters)
        self.last_adapters = adapters

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        if self.error:
            raise self.error
        return b""

    @property
    def names(self) -> list[str]:
        assert self.status is not None
        return list(self.status.adapters)


def run(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[WorkerAdapters, Worker, Worker], Awaitable[None]],
) -> None:
    monkeypatch.setattr(worker_adapters, "_STATUS_SECONDS", 0)

    async def main() -> None:
        adapters = WorkerAdapters()
        await test(adapters, Worker("a"), Worker("b"))
        await adapters.close()

    asyncio.run(main())


async def observe(adapters: WorkerAdapters, *workers: Worker) -> None:
    for worker in workers:
        adapters.observe(worker)
    await asyncio.gather(*adapters._tasks.values())
    await asyncio.sleep(0)


def test_load_on_all_workers_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(adapters: WorkerAdapters, a: Worker, b: Worker) -> None:
        for error in (RefusedError("request", "other shapes"), ReplicaLostError("", "500")):
            b.error = error
            with pytest.raises(type(error), match=str(error)):
                await adapters.load("x", "/x", [a, b])
            assert not a.names and not adapters.with_changes({})
        b.error = None
        await adapters.load("x", "/x", [a, b])
        assert a.names == b.names == ["x"] and adapters.with_changes({}) == {"x": "/x"}
        with pytest.raises(RefusedError, match="already loaded"):
            await adapters.load("x", "/y", [a, b])
        with pytest.raises(RefusedError, match="unknown adapter 'y'"):
            await adapters.unload("y", [a, b])

    run(monkeypatch, test)


def test_worker_that_misses_a_change_gets_it_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(adapters: WorkerAdapters, a: Worker, b: Worker) -> None:
        b.error = NoReplicaError("502")
        await adapters.load("x", "/x", [a, b])
        await observe(adapters, a, b)
        assert (a.names, b.names) == (["x"], [])
        b.error = None
        await observe(adapters, a, b)
        assert b.names == ["x"]

        b.error = NoReplicaError("502")
        await adapters.unload("x", [a, b])
        assert (a.names, b.names) == ([], ["x"]) and not adapters.with_changes({"x": "/x"})
        b.error = None
        await observe(adapters, a, b)
        assert b.names == []
        await adapters.load("x", "/x", [a, b])
        b.start_again("2")
        await observe(adapters, a, b)
        assert b.names == ["x"]
        a.error = b.error = NoReplicaError("502")
        with pytest.raises(NoReplicaError, match="502"):
            await adapters.load("y", "/y", [a, b])

    run(monkeypatch, test)


def test_change_of_another_client_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that refuses a change does not count as another client."""
    now = [0.0]
    monkeypatch.setattr(worker_adapters, "monotonic", lambda: now[0])

    async def test(adapters: WorkerAdapters, a: Worker, b: Worker) -> None:
        await adapters.load("x", "/x", [a, b])
        await observe(adapters, a, b)
        b.start_again("2")
        b.error = RefusedError("request", "not here")
        now[0] = 100
        await observe(adapters, a, b)
        now[0] = 200
        await observe(adapters, a, b)
        assert adapters.with_changes({}) == {"x": "/x"} and not b.names
        a.start_again("1")
        await observe(adapters, a, b)
        assert not adapters.with_changes({}) and not a.names

    run(monkeypatch, test)
