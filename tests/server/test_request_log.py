"""The request log and OpenTelemetry spans; neither contains text of a request."""

import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headrace.errors import RequestError
from headrace.server.request_record import PARTS, RequestRecord
from tests.server.running import Running, running, until

CHAT = {
    "messages": [{"role": "user", "content": "hello hello"}],
    "max_tokens": 5,
    "temperature": 0,
    "ignore_eos": True,
}
FLAGS = ("--threads", "1", "--kv-blocks", "1024")


@pytest.fixture(scope="module")
def logging_server(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS, "--log-format", "json", "--request-timeout", "1.5")


def lines(server: Running) -> list[dict[str, Any]]:
    """Return the log lines about requests."""
    return [
        line
        for text in server.log
        if text.startswith("{") and (line := json.loads(text))["logger"] == "headrace.requests"
    ]


def line_of(server: Running, request_id: str) -> dict[str, Any]:
    until(lambda: any(line["id"] == request_id for line in lines(server)))
    (line,) = [line for line in lines(server) if line["id"] == request_id]
    return line


def test_log_line_has_tokens_and_times(logging_server: Running) -> None:
    for streamed in (False, True):
        reply = logging_server.post(
            "/v1/chat/completions",
            CHAT
            | {"n": 2, "stream": streamed}
            | ({"stream_options": {"include_usage": True}} if streamed else {}),
            {"x-request-id": f"mine-{streamed}"},
        )
        assert reply.headers["x-request-id"] == f"mine-{streamed}"
        line = line_of(logging_server, f"mine-{streamed}")
        tokens = logging_server.post("/tokenize", {"messages": CHAT["messages"]}).json["count"]
        assert (line["method"], line["path"], line["status"], line["model"]) == (
            "POST",
            "/v1/chat/completions",
            200,
            "tiny.gguf",
        )
        assert (line["prompt_tokens"], line["output_tokens"], line["finish_reasons"]) == (
            tokens,
            10,
            ["length"] * 2,
        )
        assert (
            line["prefill"] > 0
            and line["decode"] > 0
            and sum(line[part] for part in PARTS) == pytest.approx(line["seconds"])
        )
        assert "error" not in line
        timing = (reply.events[-2] if streamed else reply.json)["timing"]
        assert timing.keys() == set(PARTS)
        assert all(timing[part] == line[part] for part in PARTS if part != "network")
        assert 0 <= timing["network"] <= line["network"]  # the response was not written yet
    logging_server.post(
        "/v1/completions",
        {"prompt": ["one", "two"], "max_tokens": 3, "ignore_eos": True},
        {"x-request-id": "two"},
    )
    assert line_of(logging_server, "two")["output_tokens"] == 6


def test_log_line_has_the_error(logging_server: Running) -> None:
    logging_server.post(
        "/v1/chat/completions", CHAT | {"temperature": -1}, {"x-request-id": "wrong"}
    )
    assert [line_of(logging_server, "wrong")[name] for name in ("status", "error")] == [
        400,
        "invalid_value",
    ]
    slow = {
        "max_tokens": 3900,
        "n": 32,  # more than a fast machine ends within the timeout
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    logging_server.post("/v1/chat/completions", CHAT | slow, {"x-request-id": "late"})
    late = line_of(logging_server, "late")
    assert (late["status"], set(late["finish_reasons"])) == (200, {"timeout"}) and late[
        "output_tokens"
    ] > 0
    connection = logging_server.open_stream("/v1/chat/completions", CHAT | slow | {"stream": False})
    until(lambda: logging_server.figures()["headrace_sequences_running"] > 1)
    connection.close()
    until(lambda: lines(logging_server)[-1].get("error") == "client_left")
    assert lines(logging_server)[-1]["status"] == 499


def test_log_has_no_text_and_cannot_be_forged(logging_server: Running) -> None:
    before = len(lines(logging_server))
    logging_server.post(
        "/v1/chat/completions",
        CHAT | {"model": 'x"\n{"logger": "headrace.requests"}'},
        {"x-request-id": "a b"},
    )
    logging_server.get('/nowhere%0A{"logger":"headrace.requests","id":"forged"}')
    logging_server.get("/health")
    logging_server.get("/metrics")
    until(lambda: len(lines(logging_server)) == before + 2)
    assert [line["status"] for line in lines(logging_server)[before:]] == [404, 404]
    assert all(len(line["id"]) == 32 for line in lines(logging_server)[before:])
    assert not any("hello" in text for text in logging_server.log)


def test_text_log_line(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    server.post("/v1/completions", body, {"x-request-id": "mine"})
    until(lambda: any("id mine" in line for line in server.log))
    (line,) = [line for line in server.log if "id mine" in line]
    assert re.search(
        r'POST "/v1/completions" 200 [\d.]+ s, "tiny.gguf", \d+ prompt tokens \(0 cached\), '
        r"2 output tokens, id mine$",
        line,
    )
    server.get("/nowhere%0Aforged")
    until(lambda: any("nowhere" in line for line in server.log))
    (line,) = [line for line in server.log if "nowhere" in line]
    assert r'GET "/nowhere\nforged" 404' in line
    assert not any(line.startswith("forged") for line in server.log)


class Collector:
    """A collector that receives spans over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        found = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for item in found
            for resource in item.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def test_tracing_sends_spans_to_a_collector(model: str) -> None:
    collector = Collector()
    endpoint = f"http://127.0.0.1:{collector.server.server_port}/v1/traces"
    for server in running(model, *FLAGS, "--otlp-endpoint", endpoint):
        parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
        server.post("/v1/chat/completions", CHAT, {"traceparent": parent})
        server.post("/v1/chat/completions", CHAT | {"temperature": -1})
    collector.server.shutdown()
    collector.server.server_close()
    (request,) = [span for span in collector.spans if span.name == "llm_request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (
        "0123456789abcdef" * 2,
        "0123456789abcdef",
    )
    attributes = {item.key: item.value for item in request.attributes}
    assert (
        attributes["gen_ai.usage.output_tokens"].int_value == 5
        and attributes["http.response.status_code"].int_value == 200
    )
    phases = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    for span, following in pairwise(phases):
        assert span.end_time_unix_nano == following.start_time_unix_nano
    assert request.start_time_unix_nano <= phases[0].start_time_unix_nano
    assert abs(phases[-1].end_time_unix_nano - request.end_time_unix_nano) < 1000
    assert not any(b"hello" in body for body in collector.bodies)


def test_tracing_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.server.tracing import otlp_exporter

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RequestError, match=r"pip install 'headrace\[otel\]'"):
        otlp_exporter("http://127.0.0.1:4318/v1/traces")


@pytest.mark.parametrize(
    "given, is_kept",
    [
        ("a" * 128, True),
        ("a" * 129, False),
        ("a-1.b:2_c", True),
        ("", False),
        ("a b", False),
        ("é", False),
    ],
)
def test_x_request_id(given: str, is_kept: bool) -> None:
    request_id = RequestRecord.of("GET", "/", {"x-request-id": given}).id
    assert (request_id == given) == is_kept
