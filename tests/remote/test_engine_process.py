"""The engine process of a server: its start, its end, and restarts after it dies or hangs."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.remote import client as engine_client
from headrace.remote import start as engine_start
from headrace.remote import watch
from headrace.remote.errors import EngineDeadError
from tests.server.running import SECONDS, Running, alive, in_background, running, until

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "ignore_eos": True,
}
LONG = CHAT | {"max_tokens": 4000}
SCORED = LONG | {"logprobs": True, "top_logprobs": 20}
SLOW = SCORED | {"n": 4, "temperature": 1}
"""A request that outlasts a report of figures; a fast machine generates `LONG` in 0.2 s."""
FLAGS = ("--max-num-seqs", "8", "--max-waiting", "4", "--threads", "1", "--kv-blocks", "1024")


@pytest.fixture
def fresh(model: str) -> Iterator[Running]:
    """A server of this test alone."""
    yield from running(model, *FLAGS, "--drain-seconds", "0.2")


class TestEngineProcess:
    def test_imports_nothing_from_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
        monkeypatch.chdir(tmp_path)
        with engine_start.starting_engine() as started:
            started.connection.close()
            assert started.process.wait(SECONDS) == 0

    def test_engine_that_no_client_took_leaves_nothing(self) -> None:
        """A wrong option of `headrace serve` is found after the process has started."""
        with pytest.raises(RequestError), engine_start.starting_engine() as started:
            raise RequestError("wrong option")
        assert started.connection.fileno() == -1 and started.process.poll() is not None
        with pytest.raises(ValueError):
            started.heartbeat.read()

    def test_restarts_after_a_kill(self, fresh: Running) -> None:
        body = SCORED | {"stream": True}
        first = fresh.engine_pid
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", body)] * 6)
        whole = [lambda: fresh.post("/v1/chat/completions", SCORED)] * 2
        replies_whole, more = in_background(whole)
        until(lambda: fresh.figures()["headrace_sequences_running"] == 8)
        os.kill(first, signal.SIGKILL)
        for thread in [*threads, *more]:
            thread.join(SECONDS)
        assert all(
            reply.events[-1] == "[DONE]" and reply.events[-2]["error"]["code"] == "engine_dead"
            for reply in replies
        )
        assert [(reply.status, reply.json["error"]["code"]) for reply in replies_whole] == [
            (503, "engine_dead")
        ] * 2
        until(lambda: fresh.get("/health/ready").status == 200)
        assert (
            fresh.engine_pid != first
            and fresh.get("/health").json["restarts"] == 1
            and not alive(first)
        )
        assert fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).status == 200

    def test_restarts_after_a_kill_with_unread_requests(self, fresh: Running) -> None:
        """Its socket is then reset, not closed."""
        pid = fresh.engine_pid
        os.kill(pid, signal.SIGSTOP)
        stream = fresh.open_stream("/v1/chat/completions", CHAT)
        until(lambda: fresh.get("/health/ready").status == 503)  # by then it has been sent
        os.kill(pid, signal.SIGKILL)
        assert b" 503 " in stream.recv(100)
        stream.close()
        until(lambda: fresh.get("/health/ready").status == 200 and fresh.engine_pid != pid)
        assert fresh.post("/v1/chat/completions", CHAT).status == 200

    def test_is_not_ready_while_stopped_and_then_restarts(self, fresh: Running) -> None:
        first = fresh.engine_pid
        replies, threads = in_background(
            [lambda: fresh.post("/v1/chat/completions", SCORED | {"stream": True})] * 3
        )
        until(lambda: fresh.figures()["headrace_sequences_running"] == 3)
        os.kill(first, signal.SIGSTOP)
        until(lambda: fresh.get("/health/ready").status == 503)
        assert fresh.get("/health/live").status == 200
        for thread in threads:
            thread.join(SECONDS)
        assert all(reply.events[-2]["error"]["code"] == "engine_dead" for reply in replies)
        until(lambda: fresh.get("/health/ready").status == 200)
        assert fresh.engine_pid != first and not alive(first)

    def test_keeps_its_requests_over_a_pause(self, fresh: Running) -> None:
        first = fresh.engine_pid
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", SLOW)])
        until(lambda: fresh.figures()["headrace_sequences_running"] == 4)
        os.kill(first, signal.SIGSTOP)
        until(lambda: fresh.get("/health/ready").status == 503)
        os.kill(first, signal.SIGCONT)
        threads[0].join(SECONDS)
        assert replies[0].status == 200 and fresh.engine_pid == first

    def test_server_ends_after_too_many_restarts(self, model: str) -> None:
        server = Running(model, *FLAGS)
        for restarts in range(1, 5):
            os.kill(server.engine_pid, signal.SIGKILL)
            until(
                lambda restarts=restarts: (
                    server.process.poll() is not None or _restarted(server, restarts)
                )
            )
        assert server.stop() == 1
        assert sum("restarting it" in line for line in server.log) == 3

    def test_ends_with_the_server(self, model: str) -> None:
        server = Running(model, *FLAGS)
        engine = server.engine_pid
        connection = server.open_stream("/v1/chat/completions", SLOW | {"stream": True})
        until(lambda: not server.at_rest())
        server.process.kill()
        until(lambda: not alive(engine))
        connection.close()
        server.stop()


def _restarted(server: Running, times: int) -> bool:
    try:
        health = server.get("/health/ready")
    except ConnectionError:
        return False
    return health.status == 200 and health.json["restarts"] == times


def test_engine_that_never_loads_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.setattr(engine_start, "COMMAND", (sys.executable, str(tmp_path / "hangs.py")))
    monkeypatch.setattr(watch, "_LOAD_SECONDS", 0.5)
    engine = engine_client.EngineClient("model", EngineConfig(), {}, stall_seconds=60)

    async def start() -> None:
        try:
            await asyncio.wait_for(engine.start(), SECONDS)
        finally:
            await engine.close()

    with pytest.raises(EngineDeadError, match="no progress for"):
        asyncio.run(start())
