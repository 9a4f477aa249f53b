"""What goes wrong around a request: clients that leave, engines that die or hang, ends of the
server, too much at once.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.remote import client as engine_client
from headrace.remote import start as engine_start
from headrace.remote.errors import EngineDeadError
from tests.server.running import SECONDS, Reply, Running, running, until

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "ignore_eos": True,
}
LONG = CHAT | {"max_tokens": 4000}
FLAGS = ("--max-num-seqs", "8", "--max-waiting", "4", "--threads", "1", "--kv-blocks", "1024")


@pytest.fixture
def fresh(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS, "--drain-seconds", "0.2", "--max-per-key", "12")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it is not there, or goes as it is looked at
        return False


def in_background(calls: list[Callable[[], Reply]]) -> tuple[list[Reply], list[threading.Thread]]:
    """Calls, each in a thread, and the list that their replies go to."""
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda call=call: replies.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    return replies, threads


class TestClients:
    def test_one_that_leaves_ends_its_request(self, fresh: Running) -> None:
        for body in (LONG | {"stream": True}, LONG, LONG | {"n": 4, "temperature": 1}):
            connection = fresh.open_stream("/v1/chat/completions", body)
            begun = fresh.figures()["headrace_generated_tokens_total"]
            until(lambda: not fresh.at_rest())
            connection.close()
            until(fresh.at_rest)
            ended = fresh.figures()["headrace_generated_tokens_total"]
            time.sleep(0.3)
            assert (
                fresh.figures()["headrace_generated_tokens_total"]
                == ended
                < begun + 4000 * body.get("n", 1)
            )
        assert fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).status == 200

    def test_a_storm_of_them(self, fresh: Running) -> None:
        for begin in range(0, 36, 6):
            connections = [
                fresh.open_stream("/v1/chat/completions", LONG | {"stream": i % 2 == 0})
                for i in range(6)
            ]
            for i, connection in enumerate(connections):
                if (begin + i) % 3 == 0:
                    connection.settimeout(SECONDS)
                    connection.recv(1)
                connection.close()
        until(fresh.at_rest)
        assert fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).status == 200

    def test_neighbours_do_not_notice(self, fresh: Running) -> None:
        body = CHAT | {"max_tokens": 600}
        expected = fresh.post("/v1/chat/completions", body).json["choices"]
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", body)] * 3)
        for _ in range(10):
            fresh.open_stream("/v1/chat/completions", LONG | {"stream": True}).close()
            fresh.post("/v1/chat/completions", body | {"logit_bias": {"9999": 1}})
            until(
                lambda: fresh.figures()["headrace_sequences_running"] <= 3
            )  # else there would be too many on a busy machine
        for thread in threads:
            thread.join(SECONDS)
        assert [reply.json["choices"] for reply in replies] == [expected] * 3

    def test_too_much_at_once(self, fresh: Running) -> None:
        reply = fresh.post("/v1/chat/completions", LONG | {"n": 13, "temperature": 1})
        assert (reply.status, reply.json["error"]["code"]) == (
            503,
            "server_overloaded",
        ) and reply.headers["retry-after"] == "1"
        streams = [
            fresh.open_stream("/v1/chat/completions", LONG | {"stream": True}) for _ in range(12)
        ]
        until(lambda: fresh.get("/health/ready").status == 503)
        reply = fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 1})
        assert (reply.status, reply.json["error"]["code"]) == (503, "server_overloaded")
        assert fresh.get("/health/live").status == 200
        for stream in streams:
            stream.close()
        until(lambda: fresh.get("/health/ready").status == 200)
        assert fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200

    def test_a_key_has_its_share(self, model: str) -> None:
        for server in running(model, *FLAGS, "--max-per-key", "2"):
            body = LONG | {"stream": True, "n": 4, "temperature": 1}
            streams = [server.open_stream("/v1/chat/completions", body) for _ in range(2)]
            until(lambda server=server: server.figures()["headrace_sequences_running"] == 8)
            reply = server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})
            for stream in streams:
                stream.close()
            assert (reply.status, reply.json["error"]["code"], reply.headers["retry-after"]) == (
                429,
                "rate_limit_exceeded",
                "1",
            )
            until(server.at_rest)
            assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200

    def test_a_request_has_its_time(self, model: str) -> None:
        for server in running(model, *FLAGS, "--request-timeout", "0.2"):
            reply = server.post("/v1/chat/completions", LONG)
            assert (reply.status, reply.json["error"]["code"], reply.headers["x-should-retry"]) == (
                504,
                "timeout",
                "false",
            )
            *_, error, done = server.post("/v1/chat/completions", LONG | {"stream": True}).events
            assert (error["error"]["code"], done) == ("timeout", "[DONE]")
            until(server.at_rest)
            assert (
                b'headrace_error_responses_total{code="timeout"} 1.0\n'
                in server.get("/metrics").body
            )

    def test_a_request_has_its_time_to_begin(self, model: str) -> None:
        """The one that runs goes on, and those behind it do not wait for ever."""
        for server in running(
            model,
            "--max-num-seqs",
            "1",
            "--threads",
            "1",
            "--kv-blocks",
            "1024",
            "--queue-timeout",
            "0.2",
        ):
            connection = server.open_stream(
                "/v1/chat/completions", LONG | {"stream": True, "n": 16, "temperature": 1}
            )
            until(lambda server=server: server.figures()["headrace_sequences_running"] == 1)
            reply = server.post("/v1/chat/completions", LONG)
            assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
            assert server.figures()["headrace_sequences_running"] == 1
            connection.close()

    def test_one_that_does_not_read_keeps_no_place(self, model: str) -> None:
        body = LONG | {"max_tokens": 3000, "stream": True, "logprobs": True, "top_logprobs": 8}
        for server in running(model, *FLAGS, "--send-timeout", "0.5"):
            before = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
            connections = [server.open_stream("/v1/chat/completions", body) for _ in range(12)]
            until(lambda server=server: server.get("/health/ready").status == 503)
            until(
                lambda server=server: server.get("/health/ready").status == 200 and server.at_rest()
            )
            until(
                lambda server=server, before=before: (
                    len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) <= before + 1
                )
            )
            assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200
            for connection in connections:
                connection.close()

    def test_one_that_does_not_send_keeps_no_place(self, model: str) -> None:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            b"application/json\r\n"
        )
        for server in running(model, *FLAGS, "--receive-timeout", "0.5"):
            for sent in (
                b"",
                b"P",
                head,
                b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + head,
            ):
                with socket.create_connection(
                    ("127.0.0.1", server.port), timeout=SECONDS
                ) as connection:
                    connection.sendall(sent)
                    assert _read_to_end(connection).count(b" 200 OK") == sent.startswith(b"GET")
            with socket.create_connection(
                ("127.0.0.1", server.port), timeout=SECONDS
            ) as connection:
                connection.sendall(head + b"content-length: 99\r\n\r\n{")
                answer = _read_to_end(connection)
                assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
            assert (
                server.post("/v1/chat/completions", LONG).status == 200
            )  # for which it may wait as long as it likes

    def test_a_head_without_an_end(self, model: str) -> None:
        for server in running(model, *FLAGS):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection,
                pytest.raises(ConnectionError),
            ):
                connection.sendall(b"GET /health HTTP/1.1\r\n")
                for _ in range(10_000):
                    connection.sendall(b"a: " + 1000 * b"b" + b"\r\n")
            assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200


def _read_to_end(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection, be it by a reset."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


class TestEngines:
    def test_one_imports_nothing_from_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it would import Headrace itself from a checkout, were it not installed in place."""
        (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
        monkeypatch.chdir(tmp_path)
        with engine_start.starting_engine() as started:
            started.connection.close()
            assert started.process.wait(SECONDS) == 0

    def test_one_that_is_killed_is_started_again(self, fresh: Running) -> None:
        body = LONG | {"stream": True}
        first = fresh.engine_pid
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", body)] * 6)
        replies_whole, more = in_background([lambda: fresh.post("/v1/chat/completions", LONG)] * 2)
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

    def test_one_that_is_killed_with_requests_that_it_has_not_read(self, fresh: Running) -> None:
        """Its socket is then reset, not ended; the requests must get an error all the same, and
        another engine be started.
        """
        pid = fresh.engine_pid
        os.kill(pid, signal.SIGSTOP)
        stream = fresh.open_stream("/v1/chat/completions", CHAT)
        until(lambda: fresh.get("/health/ready").status == 503)  # by then it has been sent
        os.kill(pid, signal.SIGKILL)
        assert b" 503 " in stream.recv(100)
        stream.close()
        until(lambda: fresh.get("/health/ready").status == 200 and fresh.engine_pid != pid)
        assert fresh.post("/v1/chat/completions", CHAT).status == 200

    def test_one_that_is_stopped_is_not_ready_and_then_started_again(self, fresh: Running) -> None:
        first = fresh.engine_pid
        replies, threads = in_background(
            [lambda: fresh.post("/v1/chat/completions", LONG | {"stream": True})] * 3
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

    def test_one_that_goes_on_after_a_pause_keeps_its_requests(self, fresh: Running) -> None:
        first = fresh.engine_pid
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", LONG)])
        until(lambda: fresh.figures()["headrace_sequences_running"] == 1)
        os.kill(first, signal.SIGSTOP)
        until(lambda: fresh.get("/health/ready").status == 503)
        os.kill(first, signal.SIGCONT)
        threads[0].join(SECONDS)
        assert replies[0].status == 200 and fresh.engine_pid == first

    def test_one_that_dies_again_and_again_ends_the_server(self, model: str) -> None:
        server = Running(model, *FLAGS)
        for restarts in range(1, 5):
            os.kill(server.engine_pid, signal.SIGKILL)
            until(
                lambda restarts=restarts: (
                    server.process.poll() is not None or _restarted(server, restarts)
                )
            )
        assert server.stop() == 1
        assert sum("it is started again" in line for line in server.log) == 3

    def test_it_ends_with_the_server(self, model: str) -> None:
        server = Running(model, *FLAGS)
        engine = server.engine_pid
        connection = server.open_stream("/v1/chat/completions", LONG | {"stream": True})
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


def test_one_that_never_loads_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.setattr(engine_start, "ENGINE", (sys.executable, str(tmp_path / "hangs.py")))
    monkeypatch.setattr(engine_client, "_LOADED", 0.5)
    engine = engine_client.EngineClient("model", EngineConfig(), {}, stall_seconds=60)

    async def start() -> None:
        try:
            await asyncio.wait_for(engine.start(), SECONDS)
        finally:
            await engine.close()

    with pytest.raises(EngineDeadError, match="it stood still for"):
        asyncio.run(start())


class TestEnds:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_what_is_under_way_is_finished(self, model: str, number: int) -> None:
        server = Running(model, *FLAGS)
        replies, threads = in_background(
            [lambda: server.post("/v1/chat/completions", LONG | {"stream": True})] * 3
        )
        until(lambda: server.figures()["headrace_sequences_running"] == 3)
        server.process.send_signal(number)
        with contextlib.suppress(ConnectionError):  # where all has ended already
            until(lambda: server.get("/health/ready").status == 503)
            reply = server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})
            assert (reply.status, reply.json["error"]["code"]) == (503, "server_shutting_down")
        for thread in threads:
            thread.join(SECONDS)
        assert all(
            reply.events[-1] == "[DONE]"
            and reply.events[-2]["choices"][0]["finish_reason"] == "length"
            for reply in replies
        )
        assert server.stop() == 0

    def test_a_second_signal_waits_for_nothing(self, model: str) -> None:
        server = Running(model, *FLAGS, "--drain-seconds", "600")
        replies, threads = in_background(
            [
                lambda: server.post(
                    "/v1/chat/completions", LONG | {"stream": True, "n": 8, "temperature": 1}
                )
            ]
        )
        until(lambda: server.figures()["headrace_sequences_running"] == 8)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.stop(signal.SIGTERM) == 0
        threads[0].join(SECONDS)
        assert replies[0].events[-2]["error"]["code"] == "server_shutting_down"


class TestStarts:
    @pytest.mark.parametrize(
        "flags, code, says",
        [
            (["/nowhere.gguf"], 3, "/nowhere.gguf"),
            (["MODEL", "--host", "0.0.0.0"], 2, "--api-key"),
            (["MODEL", "--max-model-len", "100000"], 2, "context ends at 4,096"),
            (["MODEL", "--lora", "x"], 2, "NAME=PATH"),
            (["MODEL", "--lora", "x=/nowhere"], 3, "/nowhere"),
            (["MODEL", "--port", "TAKEN"], 5, "--port"),
            (["MODEL", "--kv-blocks", "60000000"], 4, "kv_blocks may be"),
        ],
    )
    def test_what_cannot_start_says_why_on_one_line(
        self, model: str, flags: list[str], code: int, says: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            names = {"MODEL": model, "TAKEN": str(taken.getsockname()[1])}
            command = [
                sys.executable,
                "-m",
                "headrace",
                "serve",
                *(names.get(flag, flag) for flag in flags),
            ]
            if "TAKEN" not in flags:
                command += ["--port", "0"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        lines = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
        assert done.returncode == code and len(lines) == 1 and says in lines[0], done.stderr
        assert "Traceback" not in done.stderr and not done.stdout

    def test_it_listens_on_one_port_of_this_machine(self, server: Running) -> None:
        pids = {server.process.pid, server.engine_pid}
        inodes = {
            os.readlink(link)
            for pid in pids
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if link.exists()
        }
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        listening = [
            fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes
        ]
        assert listening == [f"0100007F:{server.port:04X}"]

    def test_what_it_says(self, server: Running) -> None:
        lines = [line for line in server.log if not line[:4].isdigit()]
        assert (
            len(lines) <= 12
            and json.loads(lines[-1].partition("-d '")[2].rstrip("'\n"))["model"] == "tiny.gguf"
        )
