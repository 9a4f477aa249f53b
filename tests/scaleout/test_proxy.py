"""Workers, each with a proxy before it: only what a worker itself says is final."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest
from aiohttp import web

from headrace.errors import NoReplicaError
from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.replica_status import ReplicaStatus, encode_status
from headrace.remote.stream import Stream
from headrace.scaleout.dispatcher import ReplicaLostError
from headrace.scaleout.http_worker import HttpWorker
from headrace.server import worker as worker_routes
from tests.scaleout.cluster import WORKER, contents, free_port, streaming
from tests.scaleout.proxy import Proxy
from tests.scaleout.test_route import undisturbed
from tests.server.running import Running, until

INFO = frames.EngineInfo(
    architecture="llama",
    vocab_size=9,
    dim=8,
    max_model_len=64,
    max_num_seqs=4,
    kv_tokens=64,
    kv_bytes=1,
    weight_bytes=1,
    kv_dtype="bf16",
    threads=1,
    backend="cpu",
    lossy="",
    activations="int8",
    block_size=32,
)
STATUS = ReplicaStatus(
    boot_id="1",
    state="ready",
    draining=False,
    info=INFO,
    report=frames.Report({}, {}, {}),
    adapters={},
    restarts=0,
    step_seconds=0.0,
)
HTML = "<h1>an error of a proxy</h1>"
OWN = '{"error": {"message": "so it is", "code": "%s"}}'


@contextmanager
def proxies(ports: list[int]) -> Iterator[list[Proxy]]:
    started = [Proxy(port) for port in ports]
    try:
        yield started
    finally:
        for proxy in started:
            proxy.close()


def test_workers_that_die_after_their_proxies(slow: str) -> None:
    """The frontend starts before them; no client sees an error while one of them is well."""
    ports = [free_port() for _ in range(2)]
    with proxies(ports) as before, ThreadPoolExecutor(1) as pool:
        urls = ",".join(f"http://127.0.0.1:{proxy.port}" for proxy in before)
        starting = pool.submit(lambda: Running(slow, "--workers", urls, command="route"))
        until(lambda: all(proxy.num_bad_gateways > 2 for proxy in before))
        workers = [Running(slow, *WORKER, "--port", str(port)) for port in ports]
        frontend = starting.result()
        try:
            short = {"prompt": "hello", "max_tokens": 4, "seed": 1, "temperature": 1}
            expected = frontend.post("/v1/completions", short).json["choices"]
            with streaming(frontend) as streams:
                workers[0].stop(signal.SIGKILL)
                replies = [frontend.post("/v1/completions", short) for _ in range(8)]
            assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
            assert [reply.json["choices"] for reply in replies] == [expected] * 8
        finally:
            for server in (frontend, *workers):
                server.stop()


@asynccontextmanager
async def worker_with(answer: tuple[int, str]) -> AsyncIterator[HttpWorker]:
    """A client of a server with statuses, that answers to all requests alike."""

    async def status(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(encode_status(STATUS))
        await closing.wait()
        return response

    async def generate(request: web.Request) -> web.Response:
        return web.Response(status=answer[0], body=answer[1].encode("latin-1"))

    closing = asyncio.Event()
    app = web.Application()
    app.add_routes([web.get("/worker/status", status), web.post("/worker/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    arrived = asyncio.Event()
    worker = HttpWorker(f"http://127.0.0.1:{port}", "", lambda *_: arrived.set())
    watching = asyncio.ensure_future(worker.watch())
    try:
        await arrived.wait()
        yield worker
    finally:
        closing.set()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "error", "accepts", "is_full"),
    [
        *((status, HTML, NoReplicaError, False, False) for status in (500, 502, 503, 504, 429)),
        *((status, HTML, NoReplicaError, False, False) for status in (401, 403)),
        (404, HTML, NoReplicaError, True, False),
        (413, HTML, RefusedError, True, False),
        (503, OWN % "server_overloaded", NoReplicaError, True, True),
        (429, OWN % "rate_limit_exceeded", NoReplicaError, True, True),
        (503, OWN % "model_loading", NoReplicaError, False, False),
        (500, OWN % "internal_error", ReplicaLostError, False, False),
        (400, OWN % "invalid_value", RefusedError, True, False),
    ],
)
def test_answers_to_a_request(
    status: int, body: str, error: type[Exception], accepts: bool, is_full: bool
) -> None:
    """A request is tried elsewhere, unless the worker itself refuses it."""

    async def test() -> None:
        async with worker_with((status, body)) as worker:
            with pytest.raises(error, match=str(status) if body == HTML else "so it is"):
                async for _ in worker.generate(frames.Add(prompt_token_ids=[1])):
                    pass
            assert (worker.accepts_requests, worker.is_full) == (accepts, is_full)

    asyncio.run(test())


def test_worker_gets_no_more_than_it_may_queue() -> None:
    worker = HttpWorker("http://127.0.0.1:1", "", lambda *_: None)
    worker.status = msgspec.structs.replace(STATUS, max_sequences=3)
    assert worker.has_room(3) and worker.has_room(4), "the worker itself refuses what is too large"
    worker._num_sequences = 2
    assert worker.has_room(1) and not worker.has_room(2)
    worker.is_full = True
    assert not worker.has_room(1)


def test_broken_connection_to_a_worker_that_lives_is_no_death() -> None:
    """A proxy may end a connection; the next status tells."""

    async def test() -> None:
        accepted = frames.encode(frames.Accepted("1")).decode("latin-1")
        async with worker_with((200, accepted)) as worker:
            losing = asyncio.ensure_future(anext(_loss(worker)))
            await asyncio.sleep(0.05)
            assert not losing.done()
            worker._set_next_status()
            assert (await losing).boot_id == ""
            losing = asyncio.ensure_future(anext(_loss(worker)))
            await asyncio.sleep(0.05)
            worker.status = None
            worker._set_next_status()
            assert (await losing).boot_id == "1"

    asyncio.run(test())


async def _loss(worker: HttpWorker) -> AsyncIterator[ReplicaLostError]:
    try:
        async for _ in worker.generate(frames.Add(prompt_token_ids=[1])):
            pass
    except ReplicaLostError as error:
        yield error


def test_silent_response_repeats_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy ends a response that is silent for a minute, as while a long prompt is read."""
    monkeypatch.setattr(worker_routes, "_QUIET_SECONDS", 0.01)

    async def test() -> None:
        stream = Stream("1", None, lambda _: None)
        sent = worker_routes._frames(stream)
        assert {await anext(sent) for _ in range(3)} == {frames.encode(frames.Accepted("1"))}
        stream.put(frames.Ended(id="1"))
        assert [event async for event in sent] == [frames.encode(frames.Ended(id="1"))]

    asyncio.run(test())
