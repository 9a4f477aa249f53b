"""HTTP in the forms of real clients: upgrades, HTTP/1.0, HEAD, other paths, half-closed
connections.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.server.app import ROUTES
from tests.server.running import SECONDS, Running, until

COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
POSTS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
}
GETS = [path for path, route in ROUTES.items() if route.method == "GET"]


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        yield connection


def post(path: str, body: Any, *lines: str, version: str = "1.1", chunked: bool = False) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(data)}"
    head = [f"POST {path} HTTP/{version}", "content-type: application/json", framing, *lines]
    if chunked:
        half = len(data) // 2
        parts = [data[:half], data[half:], b""]
        data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return "\r\n".join([*head, "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


class TestUpgrade:
    @pytest.mark.parametrize("path", POSTS)
    @pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
    def test_offer_is_ignored(self, server: Running, path: str, chunked: bool) -> None:
        """The body of the request belongs to the request, and the connection stays usable."""
        expected = server.post(path, POSTS[path]).status
        for protocol in ("h2c", "websocket", "TLS/1.2"):
            lines = ("host: localhost", "connection: Upgrade, HTTP2-Settings", "http2-settings: AA")
            request = post(path, POSTS[path], *lines, f"upgrade: {protocol}", chunked=chunked)
            last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            with connected(server) as connection:
                connection.sendall(request + last)
                reply = read_all(connection)
            statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", reply)]
            assert statuses == [expected, 200], reply

    def test_in_small_pieces(self, server: Running) -> None:
        lines = ("host: localhost", "connection: upgrade, close", "upgrade: h2c")
        request = post("/v1/completions", COMPLETION, *lines)
        with connected(server) as connection:
            for begin in range(0, len(request), 7):
                connection.sendall(request[begin : begin + 7])
                time.sleep(0.0005)
            assert read_all(connection).startswith(b"HTTP/1.1 200 ")

    def test_connect_is_refused(self, server: Running) -> None:
        with connected(server) as connection:
            connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nhost: localhost\r\n\r\nmore")
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
        assert server.get("/health").status == 200


class TestSegments:
    def test_head_comes_with_its_body(self, server: Running) -> None:
        """A client may take the first segment for the response."""
        with connected(server) as connection:
            for _ in range(40):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
                assert b"content-length: %d\r\n" % len(body) in head + b"\r\n" and body


class TestHttp10:
    @pytest.mark.parametrize("host", [(), ("host: localhost",)], ids=["no host", "host"])
    def test_stream_ends_with_the_connection(self, server: Running, host: tuple[str, ...]) -> None:
        request = post("/v1/completions", COMPLETION | {"stream": True}, *host, version="1.0")
        with connected(server) as connection:
            connection.sendall(request)
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")

    def test_whole_response_has_its_length(self, server: Running) -> None:
        with connected(server) as connection:
            connection.sendall(post("/v1/completions", COMPLETION, version="1.0"))
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and json.loads(body)["choices"]

    def test_http_11_without_a_host_is_refused(self, server: Running) -> None:
        with connected(server) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 403 ")


class TestHead:
    @pytest.mark.parametrize("path", [*GETS, "/v1/models/tiny.gguf"])
    def test_every_get_route(self, server: Running, path: str) -> None:
        request = f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        with connected(server) as connection:
            connection.sendall(request.encode())
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and not body

    def test_options_names_the_methods(self, server: Running) -> None:
        for path, allowed in (("/", "GET, HEAD, OPTIONS"), ("/v1/completions", "POST, OPTIONS")):
            reply = server.request("OPTIONS", path)
            assert (reply.status, reply.headers["allow"], reply.body) == (204, allowed, b"")


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/v1/models/",
            "/v1/v1/models",
            "/models",
            "/v1/v1/v1/models//",
            "/openai/v1/models",
            "//v1/models",
            "/v1//models",
        ],
    )
    def test_other_forms_of_a_path(self, server: Running, path: str) -> None:
        reply = server.get(path)
        assert reply.status == 200 and reply.json["data"][0]["id"] == "tiny.gguf"
        reply = server.post(path.replace("models", "completions"), COMPLETION)
        assert reply.status == 200 and reply.json["choices"]

    def test_model_by_name(self, server: Running) -> None:
        for path in ("/v1/models/tiny.gguf/", "/models/tiny.gguf", "/v1/v1/models/tiny.gguf"):
            assert server.get(path).json["id"] == "tiny.gguf"
        assert server.get("/models/other").status == 404

    def test_errors_of_messages_keep_their_shape(self, server: Running) -> None:
        for path in ("/messages", "/v1/v1/messages", "/v1/messages/"):
            reply = server.post(path, {"model": "tiny.gguf"})
            assert (reply.status, reply.json["type"]) == (400, "error")

    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("/v1/chat/completion", "(did you mean /v1/chat/completions?)"),
            ("/v1/model", "(did you mean /v1/models?)"),
            ("/unknown/at/all", "does not exist; /openapi.json"),
            ("/" + "x" * 5000, "..."),
        ],
    )
    def test_unknown_path_is_named(self, server: Running, path: str, hint: str) -> None:
        message = server.get(path).json["error"]["message"]
        assert hint in message and path[:9] in message and len(message) < 300

    def test_deployments_of_azure(self, server: Running) -> None:
        path = "/openai/deployments/{}/{}?api-version=2024-10-21"
        for name, route, body in (
            ("tiny.gguf", "chat/completions", CHAT),
            ("tiny.gguf", "completions", COMPLETION | {"model": "other"}),
        ):
            reply = server.post(path.format(name, route), body, {"api-key": "any"})
            assert (reply.status, reply.json["model"]) == (200, "tiny.gguf")
        # The name of a model may have a slash.
        for name in ("other", "org%2Fother", "org/other"):
            reply = server.post(path.format(name, "chat/completions"), CHAT)
            assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


class TestExpect:
    @pytest.mark.parametrize(
        ("path", "length", "status"),
        [("/nope", 9, 404), ("/v1/completions", 1 << 40, 413), ("/v1/completions", 9, 100)],
    )
    def test_error_comes_before_the_body(
        self, server: Running, path: str, length: int, status: int
    ) -> None:
        lines = ["host: localhost", "expect: 100-continue", f"content-length: {length}"]
        with connected(server) as connection:
            connection.sendall("\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status)


class TestHalfClosed:
    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    @pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
    def test_client_that_ended_its_side_gets_its_response(
        self, server: Running, version: str, more: dict[str, Any]
    ) -> None:
        request = post("/v1/completions", COMPLETION | more, "host: localhost", version=version)
        with connected(server) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 200 ") and b"finish_reason" in reply

    def test_pipelined_requests(self, server: Running) -> None:
        get = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with connected(server) as connection:
            connection.sendall(get + post("/v1/completions", COMPLETION, "host: localhost") + get)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection).count(b"HTTP/1.1 200 ") == 3

    @pytest.mark.parametrize(
        "sent",
        [b"", b"GET /version HTTP/1.1\r\n", post("/v1/completions", COMPLETION)[:-5]],
        ids=["nothing", "half a head", "half a body"],
    )
    def test_incomplete_request_ends_the_connection(self, server: Running, sent: bytes) -> None:
        with connected(server) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in read_all(connection)
        until(server.at_rest)
