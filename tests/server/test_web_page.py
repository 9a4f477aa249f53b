"""The web page at `/`: files, headers, statistics and their stream."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace.server
from headrace import LLM, SamplingParams
from headrace.remote.host import blocks_of
from headrace.server.request_record import PARTS
from headrace.server.web_page import FILES, FOLDER
from headrace.stats import BlockMap, GroupMap, Holding
from tests.server.running import SECONDS, Running, running, until

LONG = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def open_events(server: Running) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    connection.sendall(b"GET /stats/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return connection


def first_events(connection: socket.socket, count: int) -> list[Any]:
    """Read the first events of a stream that sends each event as one chunk."""
    data = b""
    while data.count(b"\n\n") < count:
        chunk = connection.recv(1 << 16)
        assert chunk
        data += chunk
    return [
        json.loads(line[6:])
        for line in data.replace(b"\r", b"").split(b"\n")
        if line.startswith(b"data: ")
    ]


class TestFiles:
    def test_all_files_are_in_the_package(self) -> None:
        """All files are inside the package, so wheels include them, and all are listed."""
        assert Path(headrace.server.__file__).parent / "page" == FOLDER
        there = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*") if file.is_file()}
        assert there == {*FILES.values(), "vendor/uPlot.LICENSE"}

    @pytest.mark.parametrize("path", FILES)
    def test_content_types_and_headers(self, server: Running, path: str) -> None:
        types = {
            "html": "text/html",
            "css": "text/css",
            "js": "text/javascript",
            "svg": "image/svg+xml",
        }
        reply = server.get(path)
        assert reply.status == 200 and reply.body == (FOLDER / FILES[path]).read_bytes()
        assert (
            reply.headers["content-type"].partition(";")[0] == types[FILES[path].rpartition(".")[2]]
        )
        assert reply.headers["content-security-policy"].startswith("default-src 'self';")
        assert (
            reply.headers["x-content-type-options"] == "nosniff"
            and reply.headers["referrer-policy"] == "no-referrer"
        )
        assert reply.headers["cache-control"] == "no-cache"
        again = server.get(path, {"if-none-match": reply.headers["etag"]})
        assert (again.status, again.body) == (304, b"") and again.headers["etag"] == reply.headers[
            "etag"
        ]
        assert server.get(path, {"if-none-match": '"another"'}).status == 200

    def test_entity_tags_differ(self, server: Running) -> None:
        assert len({server.get(path).headers["etag"] for path in FILES}) == len(FILES)

    @pytest.mark.parametrize(
        "path",
        [
            *(
                "/page",
                "/page/",
                "/page/index.html",
                "/page/../app.py",
                "/page/%2e%2e/app.py",
                "/page/..%2fapp.py",
                "/page//main.js",
            ),
            *(
                "/page/vendor",
                "/page/vendor/uPlot.LICENSE",
                "/page/vendor/../main.js",
                "/page/main.js%00",
                "/index.html",
            ),
            *("/page/..\\app.py", "//page/main.js", "/page/MAIN.js", "/static/main.js"),
        ],
    )
    def test_other_files_are_not_served(self, server: Running, path: str) -> None:
        assert server.get(path).status == 404

    def test_scripts_fetch_nothing_else_and_make_no_markup(self) -> None:
        for name in FILES.values():
            text = (FOLDER / name).read_text()
            if not name.startswith("vendor/"):
                outside = text.replace("http://www.w3.org/2000/svg", "")
                assert (
                    "://" not in outside
                    and "innerHTML" not in text
                    and "eval(" not in text
                    and " style=" not in text
                ), name


class TestOtherSites:
    """Other sites' pages can reach this machine, and browsers send the page's password with
    them.
    """

    def test_body_without_content_type_from_another_site_is_refused(self, server: Running) -> None:
        """A browser sends such a body without a preflight request; JSON needs one."""
        body = json.dumps(LONG | {"max_tokens": 1, "stream": False}).encode()
        for headers, status in (
            ({}, 200),
            ({"origin": "http://evil.example"}, 415),
            ({"origin": "null"}, 415),
        ):
            connection = server.connect()
            try:
                connection.request("POST", "/v1/chat/completions", body, headers)
                assert connection.getresponse().status == status
            finally:
                connection.close()
        asking = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        reply = server.request("OPTIONS", "/v1/chat/completions", None, asking)
        assert reply.status == 204 and not [
            name for name in reply.headers if name.startswith("access-control")
        ]


class TestStats:
    def test_stats_fields(self, server: Running) -> None:
        assert (
            server.post("/v1/chat/completions", LONG | {"max_tokens": 3, "stream": False}).status
            == 200
        )
        until(
            lambda: server.get("/stats").json["figures"].get("tokens", 0) >= 3 and server.at_rest()
        )
        stats = server.get("/stats").json
        assert (
            stats["status"] == "ready" and stats["restarts"] == 0 and stats["model"] == "tiny.gguf"
        )
        engine, figures = stats["engine"], stats["figures"]
        assert engine["max_num_seqs"] == 8 and engine["threads"] == 1 and engine["weight_bytes"] > 0
        assert figures["blocks_total"] == 64 and figures["tokens"] >= 3 and figures["running"] == 0
        assert {
            "rows",
            "steps",
            "occupancy",
            "tokens_per_second",
            "drafted",
            "accepted",
            "waiting",
        } <= set(figures)
        came, after = stats["first_tokens"][-1]
        assert stats["started"] - 1 <= came <= stats["time"] + 1 and 0 <= after < SECONDS  # rounded
        assert stats["roofline"]["standing"] is None  # no request runs
        assert list(stats["latency"]) == list(PARTS) and min(stats["latency"].values()) >= 0
        held = stats["memory"]
        assert sum(held.values()) == pytest.approx(engine["memory"])
        assert held["weights"] == engine["weight_bytes"] and held["rest"] > 0
        assert sum(held[part] for part in held if part.startswith("KV")) == engine["kv_bytes"]

    def test_stats_stream_until_disconnect(self, server: Running) -> None:
        with open_events(server) as connection:
            events = first_events(connection, 3)
            assert [event["status"] for event in events] == ["ready"] * 3
            assert events[0]["time"] < events[1]["time"] < events[2]["time"]
        # If closed streams still counted, the last one would be refused.
        for _ in range(40):
            until(lambda: _opens(server))

    def test_stats_streams_are_bounded(self, server: Running) -> None:
        connections: list[socket.socket] = []

        def open_all() -> bool:
            """Open another stream; closed streams of earlier tests may count for a while."""
            connection = open_events(server)
            if _is_accepted(connection):
                connections.append(connection)
            else:
                connection.close()
            return len(connections) == 32

        try:
            until(open_all)
            reply = server.get("/stats/stream")
            assert reply.status == 503 and reply.json["error"]["code"] == "server_overloaded"
        finally:
            for connection in connections:
                connection.close()
        until(lambda: _opens(server))

    def test_stats_stream_makes_no_engine_steps(self, server: Running) -> None:
        """The engine reports only changes, and an open page changes nothing."""
        until(
            lambda: (
                server.at_rest()
                and not server.get("/stats").json["figures"].get("tokens_per_second")
            )
        )
        with open_events(server) as connection:
            events = first_events(connection, 3)
        assert events[0]["figures"] == events[2]["figures"]


def _opens(server: Running) -> bool:
    with open_events(server) as connection:
        return _is_accepted(connection)


def _is_accepted(connection: socket.socket) -> bool:
    return connection.recv(15).startswith(b"HTTP/1.1 200")


class TestShutdown:
    @pytest.fixture
    def own(self, model: str) -> Iterator[Running]:
        yield from running(model, "--threads", "1", "--kv-blocks", "64")

    def test_stats_stream_ends_with_the_server(self, own: Running) -> None:
        with open_events(own) as connection:
            first_events(connection, 1)
            assert own.stop() == 0
            data = b""
            while chunk := connection.recv(1 << 16):
                data += chunk
        assert data.endswith(b"0\r\n\r\n")  # the stream is complete


class TestBlocks:
    def test_block_map_of_running_requests(self, server: Running) -> None:
        until(server.at_rest)
        responses: list[Any] = []

        def look() -> bool:
            """Read the map; the model may have finished already."""
            until(server.at_rest)
            with server.open_stream("/v1/chat/completions", LONG) as connection:
                connection.recv(1)
                responses.append(server.get("/stats/blocks").json)
            return bool(responses[-1]["groups"][0]["holdings"])

        until(look)
        (group,) = responses[-1]["groups"]
        (holding,) = group["holdings"]
        held = [
            block
            for first, count in zip(*[iter(holding["runs"])] * 2, strict=True)
            for block in range(first, first + count)
        ]
        assert len(held) == len(set(held)) and all(
            0 <= block < group["num_blocks"] == 64 for block in held
        )
        assert (
            holding["computed"] <= len(held) * responses[-1]["block_size"]
            and holding["released"] == 0
        )
        assert len(held) >= -(-holding["computed"] // responses[-1]["block_size"])

    def test_block_map_of_cached_blocks(self, server: Running) -> None:
        until(server.at_rest)
        body = LONG | {
            "messages": [{"role": "user", "content": "hello " * 100}],
            "max_tokens": 2,
            "stream": False,
        }
        assert server.post("/v1/chat/completions", body).status == 200
        (group,) = server.get("/stats/blocks").json["groups"]
        kept = sum(group["cached"][1::2])
        assert group["holdings"] == [] and kept > 0
        until(lambda: server.get("/stats").json["figures"]["blocks_cached"] == kept)

    def test_block_map_equals_the_engine(self, llm: LLM) -> None:
        seen: list[BlockMap] = []
        stream = llm.stream(
            "hello", SamplingParams(max_tokens=200, temperature=0, n=2, ignore_eos=True)
        )
        for _, _ in zip(stream, range(60), strict=False):
            seen.append(llm.block_map())
        stream.close()
        assert any(len(item.groups[0].holdings) == 2 for item in seen)
        for item in seen:
            sent = blocks_of("1", item)
            assert sent.block_size == item.block_size
            for ours, theirs in zip(sent.groups, item.groups, strict=True):
                assert (
                    _unrolled(ours.cached) == sorted(theirs.cached)
                    and ours.num_blocks == theirs.num_blocks
                )
                for a, b in zip(ours.holdings, theirs.holdings, strict=True):
                    assert (a.request, a.seq, a.computed) == (b.request, b.seq, b.computed)
                    assert [-1] * a.released + _unrolled(a.runs) == b.blocks

    def test_block_runs(self) -> None:
        blocks = BlockMap(
            16, [GroupMap(2, 64, 12, [Holding("r", 0, 90, [-1, -1, 5, 6, 4, 3, 9])], [8, 0, 1, 11])]
        )
        (group,) = blocks_of("7", blocks).groups
        (holding,) = group.holdings
        assert (holding.released, holding.runs, group.cached) == (
            2,
            [5, 2, 4, 1, 3, 1, 9, 1],
            [0, 2, 8, 1, 11, 1],
        )
        (empty,) = blocks_of("8", BlockMap(16, [GroupMap(1, 0, 4, [], ())])).groups
        assert (empty.holdings, empty.cached) == ([], [])

    def test_concurrent_block_maps(self, server: Running) -> None:
        responses: list[Any] = []
        with server.open_stream("/v1/chat/completions", LONG):
            threads = [
                threading.Thread(target=lambda: responses.append(server.get("/stats/blocks")))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
        assert [response.status for response in responses] == [200] * 8


def _unrolled(runs: list[int]) -> list[int]:
    return [
        block
        for first, count in zip(runs[::2], runs[1::2], strict=True)
        for block in range(first, first + count)
    ]
