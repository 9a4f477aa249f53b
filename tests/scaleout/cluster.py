"""Workers and their frontend, each a server with its own processes."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from threading import Semaphore
from typing import Any, NamedTuple

from tests.server.running import SECONDS, Reply, Running, alive, until

WORKER = ("--worker", "--threads", "1", "--kv-blocks", "1024", "--max-num-seqs", "16")
STREAMS = 10
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}


class Cluster(NamedTuple):
    """Workers and a frontend."""

    workers: list[Running]
    frontend: Running

    def num_workers(self) -> int:
        """Number of workers that the frontend uses."""
        return int(self.frontend.figures()["headrace_kv_blocks"]) // 1024

    def busy(self, streams: "Streams") -> Running:
        """Wait until many streams have begun; return the worker with the most."""
        streams.wait()
        return max(self.workers, key=running_in)


def running_in(worker: Running) -> int:
    return int(worker.figures()["headrace_sequences_running"])


@contextmanager
def cluster(
    model: str, number: int = 2, flags: tuple[str, ...] = (), route: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """Start workers and a frontend, and check that all their processes end."""
    started: list[Running] = []
    processes: list[int] = []
    try:
        started += [Running(model, *WORKER, *flags) for _ in range(number)]
        urls = ",".join(f"http://127.0.0.1:{worker.port}" for worker in started)
        started.append(Running(model, "--workers", urls, *route, command="route"))
        processes = [pid for server in started for pid in descendants(server)]
        yield Cluster(started[:-1], started[-1])
    finally:
        for server in reversed(started):
            server.stop()
        until(lambda: not any(map(alive, processes)))


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bodies() -> list[dict[str, Any]]:
    """Different requests for long streams, greedy and sampled."""
    options = [
        {"temperature": (0, 1, 1.3)[i % 3], "logprobs": i % 2 or None} for i in range(STREAMS)
    ]
    return [LONG | {"prompt": f"hello {i}", "seed": i} | more for i, more in enumerate(options)]


class Streams:
    """Many streams at once, each read to its end by a thread."""

    def __init__(self, server: Running, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self._begun = Semaphore(0)
        self._replies = [pool.submit(self._read, body) for body in bodies()]

    def __iter__(self) -> Iterator[Future[Reply]]:
        return iter(self._replies)

    def wait(self) -> None:
        """Wait until half of the streams have their first event.

        The metrics would tell it too late for fast streams: the engine reports them seldom.
        """
        for _ in range(STREAMS // 2):
            assert self._begun.acquire(timeout=SECONDS)

    def _read(self, body: dict[str, Any]) -> Reply:
        with self._server.open_stream("/v1/completions", body | {"stream": True}) as connection:
            response = HTTPResponse(connection)
            response.begin()
            first = response.read(1)
            self._begun.release()
            return Reply(response.status, {}, first + response.read())


@contextmanager
def streaming(server: Running) -> Iterator[Streams]:
    with ThreadPoolExecutor(STREAMS) as pool:
        yield Streams(server, pool)


def contents(reply: Reply) -> list[tuple[str, Any, Any]]:
    """Text, log-probabilities and finish reasons of a stream, however it is cut into events."""
    assert reply.status == 200 and reply.events[-1] == "[DONE]", reply.body[-500:]
    choices = [choice for event in reply.events[:-1] for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    scores = [
        score
        for choice in choices
        if choice["logprobs"]
        for score in choice["logprobs"]["token_logprobs"]
    ]
    return [
        (text, scores, [choice["finish_reason"] for choice in choices if choice["finish_reason"]])
    ]


def descendants(server: Running) -> list[int]:
    """Ids of the processes of a server."""
    pids, unseen = [], [server.process.pid]
    parents = {int(stat.parent.name): _parent(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    while unseen:
        pid = unseen.pop()
        pids.append(pid)
        unseen += [child for child, parent in parents.items() if parent == pid]
    return pids


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
