"""API keys, host names, methods and invalid bodies."""

import asyncio
import base64
import contextlib
import gzip
import http.client
import importlib
import json
import socket
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from headrace.errors import RequestError
from headrace.server.app import ROUTES, openapi_document
from headrace.server.cors import read_origins
from headrace.server.serving import check, listen
from headrace.server.settings import Settings
from tests.server.running import SECONDS, Running, running

KEYS = ("first-key", "second-key")
PAGE = "http://localhost:3000"
OPEN = {"/health", "/health/live", "/health/ready"}
USER = {"role": "user", "content": "hello"}
CHAT = {"messages": [USER], "max_tokens": 2, "temperature": 0}
HALVES = [
    "\ud83d",
    "a\udc00b",
    "\udc00\ud83d",
    "\\ud83d\ud83d",
    "\ud83d\ud83d\ude00",
    "\ud83d\\u0041",
]


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {name: _with_whole_characters(item) for name, item in value.items()}
    return [_with_whole_characters(item) for item in value] if isinstance(value, list) else value


def _raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


CODECS = {
    "gzip": gzip.compress,
    "X-Gzip, identity": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    "deflate": zlib.compress,
    " Deflate ": _raw_deflate,
    "deflate, gzip": lambda data: gzip.compress(zlib.compress(data)),
}
with contextlib.suppress(ImportError):  # an older installation may lack it
    CODECS["zstd"] = importlib.import_module("backports.zstd").compress


@pytest.fixture(scope="module")
def guarded(model: str) -> Iterator[Running]:
    keys = [f"--api-key={key}" for key in KEYS]
    origins = f"--allowed-origins={PAGE},https://chat.example"
    yield from running(model, "--threads", "1", "--kv-blocks", "16", *keys, origins)


class TestApiKeys:
    @pytest.mark.parametrize("path", [*ROUTES, "/v1/models/x", "/", "/nowhere"])
    def test_every_route_except_health_needs_a_key(self, guarded: Running, path: str) -> None:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
            status = guarded.request(method, path).status
            assert (status == 401) == (path not in OPEN), (method, status)

    @pytest.mark.parametrize(
        "path",
        [
            "//v1/models",
            "/health/../v1/models",
            "/v1/models#/health",
            "/v1/models?x=/health",
            "/%2fhealth",
        ],
    )
    def test_paths_that_resemble_health_need_a_key(self, guarded: Running, path: str) -> None:
        for host in ("localhost", "a/health?x=", "x/health#"):
            assert guarded.get(path, {"host": host}).status == 401

    def test_ways_to_send_a_key(self, guarded: Running) -> None:
        basic = base64.b64encode(b"anyone:second-key").decode()
        good = [
            {"authorization": "Bearer first-key"},
            {"x-api-key": "second-key"},
            {"api-key": "second-key"},
            {"authorization": f"Basic {basic}"},
        ]
        bad = [
            {"authorization": "Bearer first-ke"},
            {"authorization": "Bearer "},
            {"authorization": "first-key"},
            {"x-api-key": "\xff"},
        ]
        bad += [
            {"authorization": "Basic !"},
            {"authorization": "Basic " + base64.b64encode(b"first-key").decode()},
        ]
        assert [guarded.get("/v1/models", headers).status for headers in good] == [200] * 4
        replies = [guarded.get("/v1/models", headers) for headers in bad]
        assert [reply.status for reply in replies] == [401] * len(bad)
        error = replies[0].json["error"]  # LiteLLM recognises the error by its type
        assert (error["type"], error["code"]) == (
            "authentication_error",
            "invalid_api_key",
        ) and "www-authenticate" in replies[0].headers

    def test_keys_do_not_share_the_prefix_cache(self, guarded: Running) -> None:
        body = CHAT | {"messages": [{"role": "user", "content": "hello " * 50}]}

        def cached(key: str, **more: str) -> int:
            reply = guarded.post(
                "/v1/chat/completions", body | more, {"authorization": f"Bearer {key}"}
            )
            assert reply.status == 200
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached(KEYS[0]), cached(KEYS[0]) > 0, cached(KEYS[1]), cached(KEYS[1]) > 0] == [
            0,
            True,
            0,
            True,
        ]
        assert cached(KEYS[0], cache_salt="mine") == 0


class TestOrigins:
    """Cross-origin resource sharing."""

    PREFLIGHT: ClassVar[dict[str, str]] = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/x"])
    def test_preflight_needs_no_key(self, guarded: Running, path: str) -> None:
        reply = guarded.request("OPTIONS", path, headers=self.PREFLIGHT | {"origin": PAGE})
        assert (reply.status, reply.body) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert (
            reply.headers["access-control-allow-headers"]
            == self.PREFLIGHT["access-control-request-headers"]
        )
        method = "POST" if "chat" in path else "GET"
        assert method in reply.headers["access-control-allow-methods"]

    def test_responses_and_errors_are_readable(self, guarded: Running) -> None:
        key = {"authorization": "Bearer first-key"}
        bodies = [CHAT, CHAT | {"stream": True}, {"messages": []}]
        for headers, body in [*((key, body) for body in bodies), ({}, CHAT)]:
            reply = guarded.post("/v1/chat/completions", body, headers | {"origin": PAGE})
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert reply.headers["vary"] == "origin"

    @pytest.mark.parametrize("origin", ["http://localhost:3001", "https://evil.example", "null"])
    def test_other_origins_are_refused(self, guarded: Running, origin: str) -> None:
        headers = {"origin": origin, "authorization": "Bearer first-key"}
        for reply in (
            guarded.post("/v1/chat/completions", CHAT, headers),
            guarded.request("OPTIONS", "/v1/models", headers=headers | self.PREFLIGHT),
        ):
            assert "access-control-allow-origin" not in reply.headers

    def test_closed_by_default(self, server: Running) -> None:
        for method in ("OPTIONS", "GET"):
            reply = server.request(method, "/v1/models", headers=self.PREFLIGHT | {"origin": PAGE})
            assert not [name for name in reply.headers if name.startswith("access-control")]

    @pytest.mark.parametrize(
        ("argument", "origins"),
        [
            ("*", ("*",)),
            ('["*"]', ("*",)),
            ('["http://A:1", "null"]', ("http://a:1", "null")),
            ("http://a , https://b.example:8443", ("http://a", "https://b.example:8443")),
        ],
    )
    def test_argument(self, argument: str, origins: tuple[str, ...]) -> None:
        assert read_origins(argument) == origins

    @pytest.mark.parametrize("argument", ["localhost:3000", "http://a/", "[", '["x"]', "a b", ","])
    def test_invalid_argument(self, argument: str) -> None:
        with pytest.raises(RequestError, match="--allowed-origins"):
            read_origins(argument)


class TestHosts:
    def test_other_host_names_are_refused(self, server: Running) -> None:
        hosts = {
            "localhost": 200,
            "127.0.0.1:80": 200,
            "[::1]:9": 200,
            "evil.example": 403,
            "localhost.evil.example": 403,
            "": 403,
        }
        for host, status in hosts.items():
            assert server.get("/v1/models", {"host": host}).status == status, host

    def test_other_machines_need_a_key(self) -> None:
        for host in ("0.0.0.0", "::", "192.168.1.2"):
            with pytest.raises(RequestError, match="--api-key"):
                check(Settings(host=host))
            check(Settings(host=host, api_keys=("k",)))


def test_nagle_is_disabled() -> None:
    """With Nagle's algorithm a response's body waits 40 ms for the client's acknowledgement."""

    async def delays() -> int:
        begun: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        with listen(Settings(port=0)) as listener:
            async with await asyncio.start_server(
                lambda reader, writer: begun.put_nowait(writer), sock=listener
            ) as server:
                _, client = await asyncio.open_connection(*listener.getsockname())
                writer = await begun.get()
                no_delay = writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )
                client.close()
                writer.close()
                server.close()
        return int(no_delay)

    assert asyncio.run(delays()) == 1


class TestBodies:
    def test_method_not_allowed(self, server: Running) -> None:
        for path, route in ROUTES.items():
            other = "GET" if route.method == "POST" else "POST"
            reply = server.request(other, path)
            allowed = "GET, HEAD, OPTIONS" if route.method == "GET" else "POST, OPTIONS"
            assert (reply.status, reply.headers["allow"]) == (405, allowed)
        assert server.get("/v2").status == 404 and server.get("/v1/models/none").status == 404

    @pytest.mark.parametrize(
        "body, param",
        [
            (b"", None),
            (b"[]", None),
            (b"null", None),
            (b'"text"', None),
            (b"{", None),
            (b"\xff{}", None),
            (b"[" * 100_000, None),
            (b'{"messages": ' + b"[" * 100_000, "messages"),
            (b'{"messages": [{"role": "user", "tool_calls": [{"a": ' + b"[" * 100_000, None),
            (b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\ud800"}', "stop"),
            (b'{"messages": [{"role": "user", "content": "\\ud800"]}', None),
            (b'{"messages": [], "n": 1}', "messages"),
            (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages"),
            (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages"),
            (b'{"messages": [{"content": "a"}]}', "messages"),
            (b'{"temperature": 1}', "messages"),
        ],
    )
    def test_invalid_bodies(self, server: Running, body: bytes, param: str | None) -> None:
        reply = server.post("/v1/chat/completions", body)
        assert reply.status == 400 and reply.json["error"]["param"] == param, reply.body
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize(
        "field, values",
        [
            ("temperature", ["x", -0.1, 100.5, 1e308, True, [], float("nan"), float("inf")]),
            ("top_p", [0, -1, 1.1, "1"]),
            ("n", [0, 513, 10**9, 1.5, "1"]),
            ("max_tokens", [0, -1, 2**40, 1.5]),
            ("top_k", [-2, 2**31]),
            ("seed", [2**63, "1"]),
            ("stop", [5, ["a"] * 65, ["x" * 2000], [1]]),
            ("stop_token_ids", [[-1], [2**31], ["a"], 5]),
            ("logit_bias", [{"x": 1}, {"1": 101}, {"-1": 1}, {str(2**31): 1}, {"264": 1}, [1]]),
            ("logprobs", ["yes", 3]),
            ("top_logprobs", [-1, 21, 1.5]),
            ("stream", ["yes", 1]),
            ("priority", [1001, "high"]),
            ("cache_salt", ["s" * 1025, 5]),
            ("repetition_penalty", [0, -1, 101]),
            ("presence_penalty", [-2.1, 2.1]),
        ],
    )
    def test_out_of_range_fields_are_named(
        self, server: Running, field: str, values: list[object]
    ) -> None:
        for value in values:
            reply = server.post("/v1/chat/completions", CHAT | {field: value})
            assert reply.status == 400, (value, reply.body)
            # NaN and Infinity are not JSON, so no field is named.
            if value == value and value not in (float("inf"),):
                assert reply.json["error"]["param"] == field, (value, reply.body)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    @pytest.mark.parametrize(
        "keys, named",
        [
            (["bad"], "'bad'"),
            (["1", "a", "b", "-1"], "'a', 'b', '-1'"),
            ([str(2**31)], f"'{2**31}'"),
            (list("abcdefgh"), "'a', 'b', 'c', 'd', 'e', ..."),
        ],
    )
    def test_wrong_tokens_of_biases_are_named(
        self, server: Running, path: str, keys: list[str], named: str
    ) -> None:
        body = CHAT | {"prompt": "a", "logit_bias": dict.fromkeys(keys, 1)}
        error = server.post(path, body).json["error"]
        assert error["param"] == "logit_bias"
        assert error["message"].endswith(f"in the keys {named}")

    def test_unknown_fields_and_nulls_are_ignored(self, server: Running) -> None:
        nulls = dict.fromkeys(
            [
                "temperature",
                "stop",
                "n",
                "tools",
                "stream_options",
                "seed",
                "response_format",
                "logit_bias",
            ]
        )
        plain = server.post("/v1/chat/completions", CHAT).json["choices"]
        assert (
            server.post(
                "/v1/chat/completions", CHAT | {"seed": None, "brand_new": 5, "keep_alive": "x"}
            ).json["choices"]
            == plain
        )
        assert server.post("/v1/chat/completions", nulls | CHAT).json["choices"] == plain

    def test_byte_order_mark_is_ignored(self, server: Running) -> None:
        reply = server.post("/v1/chat/completions", BOM_UTF8 + json.dumps(CHAT).encode())
        assert reply.status == 200 and reply.json["choices"]

    def test_content_type_encoding_and_size(self, server: Running) -> None:
        body = b'{"messages": []}'
        assert (
            server.post("/v1/chat/completions", body, {"content-type": "text/plain"}).status == 415
        )
        for encoding in ("", "identity", "Identity"):
            body = json.dumps(CHAT).encode()
            reply = server.post("/v1/chat/completions", body, {"content-encoding": encoding})
            assert reply.status == 200
        connection = server.connect()
        try:
            connection.request(
                "POST",
                "/v1/completions",
                iter([b"x" * (1 << 20)] * 20),
                {"content-type": "application/json"},
            )
            assert connection.getresponse().status == 413
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            pass  # the server closed the connection early
        finally:
            connection.close()
        assert server.get("/health").status == 200

    @pytest.mark.parametrize("halves", HALVES)
    @pytest.mark.parametrize("escaped", [False, True])
    def test_half_surrogate_pairs_are_mended(
        self, server: Running, halves: str, escaped: bool
    ) -> None:
        """A client that cuts text by UTF-16 units leaves half of a character."""
        call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
        turns = [USER, {"role": "assistant", "tool_calls": [call]}]
        block = {"type": "tool_result", "tool_use_id": "c", "content": halves}
        result = {"type": "function_call_output", "call_id": "c", "output": halves}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/tokenize", {"messages": [*turns, {"role": "tool", "content": halves}]}),
            ("/tokenize", {"prompt": halves}),
            ("/v1/completions", {"prompt": halves, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": [USER, USER | {"content": [block]}]}),
            ("/v1/responses", {"input": [USER, result], "max_output_tokens": 1}),
        ]
        for path, body in bodies:
            counts = []
            for sent in (body, _with_whole_characters(body)):
                text = json.dumps(sent, ensure_ascii=escaped)
                reply = server.post(path, text.encode("utf-8", "surrogatepass"))
                assert reply.status == 200, reply.body
                found = reply.json
                usage = found.get("usage", {})
                counts.append(
                    [
                        *(found.get(name) for name in ("tokens", "input_tokens")),
                        *(usage.get(name) for name in ("prompt_tokens", "input_tokens")),
                    ]
                )
            assert counts[0] == counts[1] and any(counts[0])
        assert any("surrogate" in line for line in server.log)
        assert not any(halves in line for line in server.log)

    @pytest.mark.parametrize("encoding", CODECS)
    def test_compressed_bodies_are_read(self, server: Running, encoding: str) -> None:
        plain = json.dumps(CHAT).encode()
        body = CODECS[encoding](plain)
        headers = {"content-encoding": encoding}
        expected = server.post("/v1/chat/completions", plain).json["choices"]
        reply = server.post("/v1/chat/completions", body, headers)
        assert (reply.status, reply.json.get("choices")) == (200, expected), reply.body
        for path in ("/v1/messages", "/tokenize"):
            assert server.post(path, body, headers).status == 200
        for wrong in (body[:-9], b"", plain, body + b"{}"):
            reply = server.post("/v1/chat/completions", wrong, headers)
            assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_encoding")
        assert b"the body is not " in reply.body

        # 1 GB of spaces has few bytes when it is compressed.
        bomb = CODECS[encoding](b" " * (20 << 20))
        reply = server.post("/v1/chat/completions", bomb, headers)
        assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
        assert "16,777,216 bytes when it is decompressed" in reply.json["error"]["message"]

    @pytest.mark.parametrize("encoding", ["br", "compress", "gzip, br", "gzip, gzip, gzip"])
    def test_other_encodings_are_refused(self, server: Running, encoding: str) -> None:
        body = json.dumps(CHAT).encode()
        reply = server.post("/v1/chat/completions", body, {"content-encoding": encoding})
        assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
        assert "send gzip, deflate, zstd, or an uncompressed body" in reply.json["error"]["message"]

    def test_invalid_http(self, server: Running) -> None:
        for rubbish in (
            b"\0" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /a\r\nb HTTP/1.1\r\n\r\n",
        ):
            with socket.create_connection(
                ("127.0.0.1", server.port), timeout=SECONDS
            ) as connection:
                connection.sendall(rubbish)
                connection.settimeout(2)
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    assert b" 200 " not in connection.recv(100)
        assert server.get("/health").status == 200

    def test_errors_reveal_nothing_internal(self, server: Running) -> None:
        bodies = [
            b"{",
            b'{"prompt": 5}',
            b'{"prompt": [99999999]}',
            b'{"prompt": "a", "model": "/etc/passwd"}',
            b'{"prompt": ""}',
        ]
        for body in bodies:
            reply = server.post("/v1/completions", body)
            assert 400 <= reply.status < 500
            assert (
                b"Traceback" not in reply.body
                and b"/home" not in reply.body
                and b".py" not in reply.body
                and b"0x" not in reply.body
            )


def test_openapi_document_has_every_route_and_record() -> None:
    document = openapi_document()
    assert {path for path in document["paths"] if "{" not in path} == set(ROUTES)
    for path, route in ROUTES.items():
        if route.record:
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
                "schema"
            ]
            fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]][
                "properties"
            ]
            assert set(fields) == set(route.record.__struct_fields__)
