"""Disconnects, overload, timeouts, startup and shutdown of the server."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import slow_engine
from tests.server.running import SECONDS, Running, in_background, running, until

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "ignore_eos": True,
}
LONG = CHAT | {"max_tokens": 4000}
SLOW = LONG | {"logprobs": True, "top_logprobs": 20}
"""A request that takes half a second; a fast machine generates `LONG` in 0.2 s."""
FLAGS = ("--max-num-seqs", "8", "--max-waiting", "4", "--threads", "1", "--kv-blocks", "1024")


@pytest.fixture
def fresh(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS, "--drain-seconds", "0.2", "--max-per-key", "12")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def loading(model: str, gate: Path) -> Iterator[Running]:
    """A server whose model loads until the file `gate` exists."""
    server = Running(
        model,
        *FLAGS,
        "--stall-seconds",
        "1",
        env={slow_engine.VARIABLE: str(gate)},
        program="tests.server.slow_engine",
        waits=False,
    )
    yield server
    assert server.stop() == 0, "".join(server.log)


class TestClients:
    def test_disconnect_aborts_the_request(self, fresh: Running) -> None:
        several = SLOW | {"temperature": 1, "n": 12}
        for body in (several | {"stream": True}, several, several):
            connection = fresh.open_stream("/v1/chat/completions", body)
            begun = fresh.figures()["headrace_generated_tokens_total"]
            until(lambda: not fresh.at_rest())
            connection.close()
            until(fresh.at_rest)
            # The figures of an engine that has ended a request arrive a little later.
            seen = [-1.0]

            def stays(seen: list[float] = seen) -> bool:
                seen.append(fresh.figures()["headrace_generated_tokens_total"])
                time.sleep(0.3)
                return seen[-1] == seen[-2]

            until(stays)
            assert seen[-1] < begun + 4000 * body.get("n", 1)
        assert fresh.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).status == 200

    def test_client_that_ends_its_side_gets_a_slow_response(self, fresh: Running) -> None:
        """An interim response shows that the client is still there."""
        body = SLOW | {"temperature": 1, "n": 8}
        with fresh.open_stream("/v1/chat/completions", body) as connection:
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        interim, _, reply = reply.partition(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue"
        assert reply.startswith(b"HTTP/1.1 200 ") and reply.count(b"finish_reason") == 8

    def test_many_disconnects(self, fresh: Running) -> None:
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

    def test_disconnects_do_not_change_other_requests(self, fresh: Running) -> None:
        body = CHAT | {"max_tokens": 600}
        expected = fresh.post("/v1/chat/completions", body).json["choices"]
        replies, threads = in_background([lambda: fresh.post("/v1/chat/completions", body)] * 3)
        for _ in range(10):
            fresh.open_stream("/v1/chat/completions", LONG | {"stream": True}).close()
            fresh.post("/v1/chat/completions", body | {"logit_bias": {"9999": 1}})
            until(
                lambda: fresh.figures()["headrace_sequences_running"] <= 3
            )  # avoids overload on a busy machine
        for thread in threads:
            thread.join(SECONDS)
        assert [reply.json["choices"] for reply in replies] == [expected] * 3

    def test_overload_is_refused_with_503(self, fresh: Running) -> None:
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

    def test_urgent_request_takes_the_place_of_a_waiting_one(self, model: str) -> None:
        """The least urgent one gives way, to more urgent ones alone."""
        flags = ("--max-num-seqs", "1", "--max-waiting", "20", *FLAGS[4:])
        for server in running(model, *flags):
            path, ended = "/v1/chat/completions", b'"code":"server_overloaded"'

            def post(n: int, priority: int, **more: Any) -> Any:
                body = SLOW | {"n": n, "priority": priority, "temperature": 1} | more
                return server.open_stream(path, body)  # noqa: B023

            first = post(16, 5, stream=True)
            waiting = [post(2, 5), post(1, 6), post(2, 7, stream=True)]
            until(lambda server=server: server.get("/health/ready").status == 503)
            refused = server.post(path, CHAT | {"priority": 7, "max_tokens": 1})
            assert (refused.status, refused.json["error"]["code"]) == (503, "server_overloaded")

            replies, threads = in_background(
                [lambda: server.post(path, CHAT | {"priority": 1, "max_tokens": 1})]  # noqa: B023
            )
            last = _read_up_to(waiting[2], ended)
            assert last.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 200 "))  # or its stream had begun
            urgent = server.post(path, CHAT | {"priority": 0, "max_tokens": 1, "n": 3})
            assert urgent.status == 200
            turned_away = _read_up_to(waiting[1], ended)
            assert turned_away.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in turned_away
            for connection in (first, *waiting):
                connection.close()
            threads[0].join(SECONDS)
            assert replies[0].status == 200
            until(server.at_rest)
            assert server.post(path, CHAT | {"max_tokens": 1, "n": 21}).status == 200

    def test_max_per_key_is_refused_with_429(self, model: str) -> None:
        for server in running(model, *FLAGS, "--max-per-key", "2"):
            body = SLOW | {"stream": True, "n": 4, "temperature": 1}
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

    def test_request_timeout(self, model: str) -> None:
        for server in running(model, *FLAGS, "--request-timeout", "0.2"):
            reply = server.post("/v1/chat/completions", SLOW)
            assert (reply.status, reply.json["error"]["code"], reply.headers["x-should-retry"]) == (
                504,
                "timeout",
                "false",
            )
            *_, error, done = server.post("/v1/chat/completions", SLOW | {"stream": True}).events
            assert (error["error"]["code"], done) == ("timeout", "[DONE]")
            until(server.at_rest)
            assert re.search(
                rb'headrace_error_responses_total{code="timeout",.*} 1.0\n',
                server.get("/metrics").body,
            )

    def test_queue_timeout(self, model: str) -> None:
        """The running request continues, and waiting requests do not wait for ever."""
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
                "/v1/chat/completions", SLOW | {"stream": True, "n": 16, "temperature": 1}
            )
            until(lambda server=server: server.figures()["headrace_sequences_running"] == 1)
            reply = server.post("/v1/chat/completions", LONG)
            assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
            assert server.figures()["headrace_sequences_running"] == 1
            connection.close()

    def test_send_timeout_of_a_client_that_does_not_read(self, model: str) -> None:
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

    def test_receive_timeout_of_a_client_that_does_not_send(self, model: str) -> None:
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
                response = _read_to_end(connection)
                assert (
                    response.startswith(b"HTTP/1.1 408 ")
                    and b'"code":"request_timeout"' in response
                )
            assert (
                server.post("/v1/chat/completions", LONG).status == 200
            )  # an idle connection has no time limit

    def test_head_of_a_request_is_bounded(self, model: str) -> None:
        for server in running(model, *FLAGS):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection,
                pytest.raises(ConnectionError),
            ):
                connection.sendall(b"GET /health HTTP/1.1\r\n")
                for _ in range(10_000):
                    connection.sendall(b"a: " + 1000 * b"b" + b"\r\n")
            assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200


def _read_up_to(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return data


def _read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


class TestShutdown:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_drain_finishes_requests(self, model: str, number: int) -> None:
        server = Running(model, *FLAGS)
        body = SLOW | {"stream": True}
        streams = [server.open_stream("/v1/chat/completions", body) for _ in range(3)]
        begun = [stream.recv(1) for stream in streams]  # the server has accepted the requests
        server.process.send_signal(number)
        with contextlib.suppress(ConnectionError):  # the server may have ended already
            until(lambda: server.get("/health/ready").status == 503)
            reply = server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})
            assert (reply.status, reply.json["error"]["code"]) == (503, "server_shutting_down")
        for first, stream in zip(begun, streams, strict=True):
            response = first + _read_to_end(stream)
            assert response.startswith(b"HTTP/1.1 200 ")
            assert b'"finish_reason":"length"' in response and b"data: [DONE]\n\n" in response
            stream.close()
        assert server.stop() == 0
        assert "WARNING" not in "".join(server.log)

    def test_second_signal_ends_at_once(self, model: str) -> None:
        server = Running(model, *FLAGS, "--drain-seconds", "600")
        replies, threads = in_background(
            [
                lambda: server.post(
                    "/v1/chat/completions", SLOW | {"stream": True, "n": 8, "temperature": 1}
                )
            ]
        )
        until(lambda: server.figures()["headrace_sequences_running"] == 8)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.stop(signal.SIGTERM) == 0
        threads[0].join(SECONDS)
        assert replies[0].events[-2]["error"]["code"] == "server_shutting_down"


class TestLoading:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/health/live", 200),
            ("GET", "/health/ready", 503),
            ("GET", "/health", 503),
            ("HEAD", "/health", 503),
            ("GET", "/v1/models", 503),
            ("GET", "/v1/models/tiny.gguf", 503),
            ("POST", "/v1/chat/completions", 503),
            ("POST", "/v1/messages", 503),
            ("GET", "/metrics", 503),
            ("GET", "/version", 200),
            ("GET", "/openapi.json", 200),
            ("GET", "/", 200),
            ("GET", "/nowhere", 404),
            ("DELETE", "/v1/models", 405),
        ],
    )
    def test_port_responds_while_the_model_loads(
        self, loading: Running, method: str, path: str, status: int
    ) -> None:
        reply = loading.request(method, path, CHAT if method == "POST" else None)
        assert reply.status == status, reply.body
        assert (reply.headers.get("retry-after") == "1") == (status == 503)
        if status == 503 and "health" not in path and path != "/v1/messages":
            assert reply.json["error"]["code"] == "model_loading"

    def test_engine_is_not_killed_after_a_long_load(self, loading: Running, gate: Path) -> None:
        """The load lasts longer than a step may, and nothing wrote the heartbeat during it."""
        time.sleep(1.2)
        gate.touch()
        assert loading.ready.wait(SECONDS)
        time.sleep(0.4)
        health = loading.get("/health/ready")
        assert (health.status, health.json["restarts"]) == (200, 0), "".join(loading.log)
        assert loading.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200

        log = "".join(loading.log)
        told = [log.index(words) for words in ("loading ", "packing ", "ready after ")]
        assert told == sorted(told)
        # Requests that came too early are in the log as requests, not as warnings.
        assert "WARNING" not in log

    def test_engine_that_loads_again_is_not_killed(self, loading: Running, gate: Path) -> None:
        gate.unlink()
        first = loading.engine_pid
        os.kill(first, signal.SIGKILL)
        until(lambda: loading.get("/health/ready").status == 503)
        time.sleep(1.2)
        assert loading.post("/v1/chat/completions", CHAT).json["error"]["code"] == "model_loading"
        gate.touch()
        until(lambda: loading.get("/health/ready").status == 200)
        time.sleep(0.4)
        health = loading.get("/health/ready")
        assert (health.status, health.json["restarts"]) == (200, 1), "".join(loading.log)


class TestStartup:
    @pytest.mark.parametrize(
        "flags, code, says",
        [
            (["/nowhere.gguf"], 3, "/nowhere.gguf"),
            (["MODEL", "--host", "0.0.0.0"], 2, "--api-key"),
            (["MODEL", "--max-model-len", "100000"], 2, "context has 4,096 tokens"),
            (["MODEL", "--lora", "x"], 2, "NAME=PATH"),
            (["MODEL", "--lora", "x=/nowhere"], 3, "/nowhere"),
            (["MODEL", "--tool-call-parser", "nosuch"], 2, "'nosuch' is unknown"),
            (["MODEL", "--port", "80000"], 2, "not a whole number from 0 to 65,535"),
            (["MODEL", "--port", "TAKEN"], 5, "--port"),
            (["MODEL", "--kv-blocks", "60000000"], 4, "set kv_blocks to"),
        ],
    )
    def test_startup_error_is_one_line(
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
        assert "Traceback" not in done.stderr and "leak" not in done.stderr and not done.stdout

    def test_listens_only_on_loopback(self, server: Running) -> None:
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

    def test_startup_announcement(self, server: Running) -> None:
        lines = [line for line in server.log if not line[:4].isdigit()]
        assert (
            len(lines) <= 12
            and json.loads(lines[-1].partition("-d '")[2].rstrip("'\n"))["model"] == "tiny.gguf"
        )
