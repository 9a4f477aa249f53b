"""`headrace audit`: our server is green, and servers that lie, hang or cut are found out."""

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.audit.answers import Output, Token, scored_tokens
from headrace.audit.bodies import Logprobs
from headrace.audit.client import MAX_BYTES
from headrace.audit.compare import Result, compare_scores, compare_texts
from headrace.audit.run import Plan, Report, audit, server_url
from headrace.cli.main import main
from headrace.errors import AuditError, RequestError
from tests.audit.lying_server import Asked, Fault, LyingServer, events, send, stream_of
from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Running, running, until

FLAGS = ("--threads", "1", "--kv-blocks", "128", "--max-num-seqs", "8")
SECONDS = 60.0
KEY = "secret-key-1234"
NEVER_OFFERED = {"drafts off (speculative.n_max)", "prefix cache off (cache_prompt)"}
"""No field of a request turns these off here, as the tokens do not depend on them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("audit")
    return str(write_tiny_gguf(folder / "tiny.gguf", {"llama.context_length": 4096}))


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS)


@pytest.fixture(scope="module")
def drafting(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS, "--proposer", "suffix")


def plan_for(server: Running | LyingServer, **changes: Any) -> Plan:
    fields = {"tokens": 12, "crowd": 4, "seconds": 250.0, "request_seconds": SECONDS} | changes
    return Plan(url=f"http://127.0.0.1:{server.port}", **fields)


def results(report: Report) -> dict[str, set[str]]:
    """The results of each row, without the equal ones."""
    found: dict[str, set[str]] = {}
    for row in report.rows:
        if row.finding.result not in (Result.EQUAL, Result.NOTED):
            found.setdefault(row.name, set()).add(row.finding.result.value)
    return found


class TestOwnServer:
    @pytest.mark.parametrize("name", ["plain", "drafting"])
    def test_all_rows_are_equal(self, name: str, request: pytest.FixtureRequest) -> None:
        plan = plan_for(request.getfixturevalue(name))
        report = audit(plan)
        assert not report.problem
        details = {row.name: row.finding.detail for row in report.rows}
        found = results(report)
        assert found.pop("n = 2, seeds", None) in (None, {"not offered"})
        assert found == {row: {"not offered"} for row in NEVER_OFFERED}, details
        assert {row.api for row in report.rows} == {"chat", "completions"}
        assert 50 < report.requests <= plan.limits.requests
        assert re.fullmatch(r"\d+ and [1-9]\d* of \d+ tokens cached", details["prefix hit"])
        assert details["unknown field"] == "ignored" and report.server

    def test_drafts_are_compared_with_a_second_server(
        self, plain: Running, drafting: Running
    ) -> None:
        plan = plan_for(drafting, against=f"http://127.0.0.1:{plain.port}")
        rows = [row for row in audit(plan).rows if row.name.startswith("other server")]
        assert len(rows) == 6 and {row.finding.result for row in rows} == {Result.EQUAL}
        until(lambda: plain.at_rest() and drafting.at_rest())

    def test_the_command(
        self, plain: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "audit.json"
        url = f"127.0.0.1:{plain.port}/v1"
        load = [
            "--tokens",
            "8",
            "--crowd",
            "2",
            "--seed",
            "5",
            "--timeout",
            "60",
            "--seconds",
            "250",
        ]
        assert main(["audit", url, "--json", str(file), "--verbose", *load]) == 0
        out, err = capsys.readouterr()
        assert re.search(r"^in a crowd +equal +equal$", out, re.MULTILINE), out
        assert re.search(r"^audit of http\S+: at most \d+ requests, [\d,]+ output tokens", err)
        facts = json.loads(file.read_text())
        assert facts["requests"] > 50 and not facts["problem"]
        assert {"row", "api", "result", "detail", "token"} == facts["rows"][0].keys()

    def test_the_key_is_sent_and_hidden(
        self, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for server in running(model, *FLAGS, "--api-key", KEY):
            url, load = f"http://127.0.0.1:{server.port}", ["--tokens", "8", "--crowd", "1"]
            assert main(["audit", url]) == 2
            assert "give another with --api-key" in capsys.readouterr().err
            assert main(["audit", url, "--api-key", KEY, *load]) == 0
            monkeypatch.setenv("HEADRACE_API_KEY", KEY)
            assert main(["audit", url, *load]) == 0
        assert KEY not in "".join(capsys.readouterr())


@contextmanager
def lying(server: Running, fault: Fault) -> Iterator[LyingServer]:
    liar = LyingServer(server.port, fault)
    try:
        yield liar
    finally:
        liar.close()


def is_stream(asked: Asked) -> bool:
    return bool(asked.get("stream"))


def spoil(change: Any, *, streams: bool | None = False) -> Fault:
    """A fault that changes the JSON of responses, or the events of streams."""

    async def fault(
        server: LyingServer, request: web.Request, asked: Asked, data: bytes
    ) -> web.StreamResponse | None:
        if "max_tokens" not in asked or is_stream(asked) is not streams:
            return None
        if is_stream(asked):
            found = events(data)
            end = change(found)
            return web.Response(body=stream_of(found, *([] if end is None else [end])))
        body = json.loads(data)
        change(body)
        return web.json_response(body)

    return fault


def text_of(choice: Any, text: str) -> None:
    message = choice.get("message") or choice.get("delta")
    if message is None:
        choice["text"] = text
    else:
        message["content"] = text


async def other_text_in_a_crowd(
    server: LyingServer, request: web.Request, asked: Asked, data: bytes
) -> web.StreamResponse | None:
    if server.num_open < 3 or is_stream(asked) or "max_tokens" not in asked:
        return None
    body = json.loads(data)
    for choice in body["choices"]:
        text_of(choice, "another text")
        choice["logprobs"] = None
    return web.json_response(body)


async def ignores_stop(
    server: LyingServer, request: web.Request, asked: Asked, data: bytes
) -> web.StreamResponse | None:
    if asked.get("temperature") != 0 or "stop" not in asked or is_stream(asked):
        return None
    body = json.loads(data)
    text_of(body["choices"][0], "text " + str(asked["stop"][0]))
    return web.json_response(body)


def shifted(body: Any) -> None:
    body["usage"]["completion_tokens"] += 3
    body["usage"]["total_tokens"] += 3


def first_top_lists(body: Any) -> Iterator[Any]:
    logprobs = body["choices"][0]["logprobs"]
    if "content" in logprobs:
        yield from (entry["top_logprobs"] for entry in logprobs["content"])


def reversed_tops(body: Any) -> None:
    for top in first_top_lists(body):
        top.reverse()


def too_likely(body: Any) -> None:
    for top in first_top_lists(body):
        for entry in top:
            entry["logprob"] = -0.1


def noisy_scores(body: Any) -> None:
    """Log-probabilities that are never the same twice."""
    noise = 1e-7 * (time.monotonic_ns() % 100_003)
    for choice in body["choices"]:
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            entry["logprob"] -= noise


def second_end(found: list[Any]) -> None:
    found.insert(-1, json.loads(json.dumps(found[-2])))


def without_role(found: list[Any]) -> None:
    for event in found:
        for choice in event["choices"]:
            choice.get("delta", {}).pop("role", None)


def new_ids(found: list[Any]) -> None:
    for number, event in enumerate(found):
        event["id"] = str(number)


def lost_piece(found: list[Any]) -> None:
    for choice in next(event for event in found if has_text(event))["choices"]:
        text_of(choice, "")


def has_text(event: Any) -> bool:
    return any(
        choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]
    )


def without_done(found: list[Any]) -> bytes:
    return b""


LIES: dict[str, tuple[Fault, set[str]]] = {
    "text in a crowd": (other_text_in_a_crowd, {"in a crowd", "sampled, in a crowd"}),
    "stop": (ignores_stop, {"stop strings"}),
    "usage": (spoil(shifted), {"output tokens of usage", "streamed: usage", "max_tokens"}),
    "order": (spoil(reversed_tops), {"top log-probabilities"}),
    "sum": (spoil(too_likely), {"top log-probabilities"}),
    "noise": (spoil(noisy_scores), {"again: log-probabilities", "in a crowd: log-probabilities"}),
    "two ends": (spoil(second_end, streams=True), {"streamed: events"}),
    "no role": (spoil(without_role, streams=True), {"streamed: events"}),
    "ids": (spoil(new_ids, streams=True), {"streamed: events"}),
    "lost piece": (spoil(lost_piece, streams=True), {"streamed", "stop strings"}),
    "no [DONE]": (spoil(without_done, streams=True), {"streamed: events"}),
}
"""Each lie with the rows that find it."""


class TestLyingServers:
    @pytest.mark.parametrize("name", LIES)
    def test_a_lie_differs(self, name: str, plain: Running) -> None:
        fault, rows = LIES[name]
        with lying(plain, fault) as liar:
            found = results(audit(plan_for(liar)))
        assert rows <= {row for row, values in found.items() if "differs" in values}, found
        assert not [row for row, values in found.items() if "failed" in values], found

    def test_the_command_tells_where(
        self, plain: Running, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with lying(plain, other_text_in_a_crowd) as liar:
            code = main(["audit", liar.url, "--tokens", "8", "--crowd", "4", "--verbose"])
        out, err = capsys.readouterr()
        assert code == 1 and re.search(r"\d+ of \d+ rows differ$", err.strip())
        assert "actual   'another text'" in out

    def test_a_refusal_is_not_offered(self, plain: Running) -> None:
        async def refuse(
            server: LyingServer, request: web.Request, asked: Asked, data: bytes
        ) -> web.StreamResponse | None:
            if {"logprobs", "n", "cache_prompt"} & asked.keys() or request.path == "/tokenize":
                error = {"error": {"message": "unsupported", "code": 400}}
                return web.json_response(error, status=400)
            return None

        with lying(plain, refuse) as liar:
            report = audit(plan_for(liar))
        found = results(report)
        assert set().union(*found.values()) == {"not offered"}
        assert {"again: log-probabilities", "n = 2, greedy", "scoring: log-probabilities"} <= set(
            found
        )
        assert "again" not in found


def always(response: Any, *, streams: bool = True, wholes: bool = True) -> Fault:
    async def fault(
        server: LyingServer, request: web.Request, asked: Asked, data: bytes
    ) -> web.StreamResponse | None:
        if "max_tokens" not in asked or not (streams if is_stream(asked) else wholes):
            return None
        made: web.StreamResponse = await response(request, data)
        return made

    return fault


async def hang(request: web.Request, data: bytes) -> web.StreamResponse:
    await asyncio.sleep(300)
    raise AssertionError("the client waits longer than its limit")


async def hang_in_the_middle(request: web.Request, data: bytes) -> web.StreamResponse:
    await send(request, data[: len(data) // 2])
    return await hang(request, data)


async def cut(request: web.Request, data: bytes) -> web.StreamResponse:
    await send(request, data[: len(data) // 2], length=len(data))
    assert request.transport
    request.transport.abort()
    raise ConnectionResetError("cut")


async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
    response = await send(request, b"")
    while True:
        await response.write(data.replace(b"data: [DONE]\n\n", b""))


async def endless_line(request: web.Request, data: bytes) -> web.StreamResponse:
    response = await send(request, b"data: ")
    while True:
        await response.write(b"x" * (1 << 16))


async def dribble(request: web.Request, data: bytes) -> web.StreamResponse:
    response = await send(request, b"")
    while True:
        await response.write(b": ping\n\n")
        await asyncio.sleep(0.05)


async def no_json(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=b"data: {'id': 1]\n\n")


async def deep_json(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=b'{"choices": ' + b"[" * 100_000)


async def wrong_types(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=b'{"choices": {"text": 5}, "usage": []}')


async def no_choices(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.json_response({"choices": []})


async def huge(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=b" " * (MAX_BYTES + 1) + data)


async def elsewhere(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://192.0.2.1/v1/completions"})


async def compressed(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data, headers={"content-encoding": "gzip"})


async def error_page(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=b"<h1>502</h1>", status=502)


async def error_in_success(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.json_response({"error": {"message": f"no {KEY}"}})


BROKEN = (hang, hang_in_the_middle, cut, endless, endless_line, dribble, no_json, deep_json)
MORE_BROKEN = (wrong_types, no_choices, huge, elsewhere, compressed, error_page, error_in_success)


class TestBrokenServers:
    @pytest.mark.parametrize("response", [*BROKEN, *MORE_BROKEN])
    def test_all_responses(self, response: Any, plain: Running) -> None:
        """The audit ends with one message, within the seconds of a few requests."""
        begun = time.monotonic()
        with lying(plain, always(response)) as liar, pytest.raises(AuditError) as raised:
            audit(plan_for(liar, request_seconds=1.0, key=KEY))
        assert time.monotonic() - begun < 60
        assert "cannot be audited" in str(raised.value) and KEY not in str(raised.value)
        assert len(str(raised.value)) < 1000

    @pytest.mark.parametrize("response", [hang_in_the_middle, cut, endless, endless_line, dribble])
    def test_streams_alone(self, response: Any, plain: Running) -> None:
        """The rows of streams fail, and other rows do not."""
        with lying(plain, always(response, wholes=False)) as liar:
            report = audit(plan_for(liar, request_seconds=3.0))
        found = results(report)
        assert found["streamed"] == {"failed"}
        assert not {"in a crowd", "max_tokens", "sampled, again"} & found.keys()

    def test_a_server_that_ends_later(
        self, plain: Running, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def tired(
            server: LyingServer, request: web.Request, asked: Asked, data: bytes
        ) -> web.StreamResponse | None:
            return await error_page(request, data) if server.num_generated > 9 else None

        with lying(plain, tired) as liar:
            code = main(["audit", liar.url, "--tokens", "8", "--crowd", "2"])
        out, err = capsys.readouterr()
        assert code == 2 and "5 probes in a row failed: status 502: <h1>502</h1>" in err
        assert "not run" in out and re.search(r"^again +equal +equal$", out, re.MULTILINE)

    def test_a_busy_server_is_asked_again(self, plain: Running) -> None:
        busy = [0]

        async def sometimes(
            server: LyingServer, request: web.Request, asked: Asked, data: bytes
        ) -> web.StreamResponse | None:
            busy[0] += 1
            return web.Response(status=503, text="busy") if busy[0] % 7 == 0 else None

        with lying(plain, sometimes) as liar:
            found = results(audit(plan_for(liar)))
        assert busy[0] > 50 and "failed" not in set().union(*found.values())

    def test_the_seconds_of_the_audit(self, plain: Running) -> None:
        async def slow(
            server: LyingServer, request: web.Request, asked: Asked, data: bytes
        ) -> web.StreamResponse | None:
            await asyncio.sleep(0.4)
            return None

        begun = time.monotonic()
        with lying(plain, slow) as liar:
            report = audit(plan_for(liar, seconds=5.0))
        assert time.monotonic() - begun < 30
        assert report.problem == "the audit did not end in 5 seconds"
        assert {row.finding.detail for row in report.having(Result.FAILED)} == {"not run"}

    def test_no_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["audit", "127.0.0.1:1"]) == 2
        assert "check that the server runs there" in capsys.readouterr().err

    def test_the_key_in_an_error_is_hidden(self, plain: Running) -> None:
        with lying(plain, always(error_in_success, streams=False)) as liar:
            with pytest.raises(AuditError) as raised:
                audit(plan_for(liar, key=KEY))
            assert liar.authorizations == {f"Bearer {KEY}"}
        assert "no ***" in str(raised.value)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with a few bytes changed, cut or repeated."""
    spoilt = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(spoilt) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del spoilt[at:]
        elif kind == 1:
            spoilt[at : at + 1] = rng.randbytes(1)
        elif kind == 2:
            spoilt[at:at] = spoilt[: rng.randrange(200)]
        else:
            spoilt[at:at] = rng.choice([b'"', b"}", b"\n", b"null", b"-1e999", b"[", b"data: "])
    return bytes(spoilt)


class TestFuzz:
    @pytest.mark.parametrize("seed", range(8))
    def test_random_changes_of_responses(self, seed: int, plain: Running) -> None:
        """Every audit ends with a report, or with one message."""
        rng = random.Random(seed)
        share = rng.choice((0.05, 0.3, 1.0))

        async def fault(
            server: LyingServer, request: web.Request, asked: Asked, data: bytes
        ) -> web.StreamResponse | None:
            return web.Response(body=mutated(rng, data)) if rng.random() < share else None

        with lying(plain, fault) as liar:
            plan = plan_for(liar, tokens=8, crowd=1)
            try:
                report = audit(plan)
            except AuditError as error:
                assert len(str(error)) < 1000
            else:
                names = [name for probe in plan.probes for name in probe.rows]
                assert len(report.rows) == 2 * len(names) and report.facts()

    @pytest.mark.parametrize(
        "head",
        [
            b"",
            b"\x00\xff" * 500,
            b"HTTP/1.1 abc\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000,
        ],
        ids=["nothing", "bytes", "status", "length", "chunks", "long header", "many headers"],
    )
    def test_broken_http(self, head: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=answer_all, args=(listener, head), daemon=True).start()
            port = listener.getsockname()[1]
            plan = Plan(url=f"http://127.0.0.1:{port}", request_seconds=2.0)
            with pytest.raises(AuditError, match="cannot be audited"):
                audit(plan)


def answer_all(listener: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(data)


class TestAddresses:
    @pytest.mark.parametrize("url", ["127.0.0.1:80", "http://localhost:1", "http://[::1]:8000/v1/"])
    def test_this_machine(self, url: str) -> None:
        assert server_url(url, remote=False).startswith("http://")

    @pytest.mark.parametrize("host", ["192.0.2.7", "example.com", "localhost.example", "0.0.0.0"])
    def test_another_machine_needs_a_flag(self, host: str) -> None:
        with pytest.raises(RequestError, match="add --remote if the server is yours"):
            server_url(f"http://{host}:8000", remote=False)
        assert server_url(f"https://{host}:8000", remote=True) == f"https://{host}:8000"

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("ftp://127.0.0.1", "is not a URL"),
            ("http://127.0.0.1:x", "is not a URL"),
            ("", "is not a URL"),
            ("http://a:b@127.0.0.1", "must not have a password"),
            ("http://127.0.0.1/v1/chat/completions", "more than a host and a port"),
            ("http://127.0.0.1?key=1", "more than a host and a port"),
        ],
    )
    def test_bad_addresses(self, url: str, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            server_url(url, remote=False)


def output(*tokens: tuple[str, float], finish_reason: str = "length") -> Output:
    return Output(
        text="".join(text for text, _ in tokens),
        finish_reason=finish_reason,
        tokens=tuple(Token(text, score) for text, score in tokens),
    )


class TestComparisons:
    def test_the_first_token_that_differs(self) -> None:
        one = output(("a", -1.0), ("b", -2.0), ("c", -3.0))
        found = compare_texts([one], [output(("a", -1.0), ("x", -2.0), ("c", -3.0))])
        assert (found.result, found.token, found.detail) == (Result.DIFFERS, 2, "'b' and 'x'")
        found = compare_texts([one], [output(("a", -1.0))])
        assert (found.token, found.detail) == (2, "'b' and the end")

    def test_texts_without_tokens(self) -> None:
        one, other = (Output(text=text, finish_reason="stop") for text in ("abc", "abd"))
        found = compare_texts([one], [other])
        assert found.token is None and found.detail == "character 3: 'c' and 'd'"
        assert compare_scores([one], [one]).result is Result.NOT_OFFERED

    def test_finish_reasons_and_counts(self) -> None:
        one, other = output(("a", -1.0)), output(("a", -1.0), finish_reason="stop")
        assert "finish_reason" in compare_texts([one], [other]).detail
        assert compare_texts([one], [one, one]).detail == "1 and 2 outputs"

    def test_scores_to_the_last_bit(self) -> None:
        one, other = (
            output(("a", -1.0), ("b", -2.0)),
            output(("a", -1.0), ("b", -2.0000000000000004)),
        )
        found = compare_scores([one], [other])
        assert (found.token, found.detail) == (2, "largest difference 4.4e-16")
        assert compare_texts([one], [other]).result is Result.EQUAL

    def test_both_shapes_of_log_probabilities(self) -> None:
        lists = Logprobs(
            tokens=["a", "b"], token_logprobs=[None, -2.0], top_logprobs=[None, {"b": -2.0}]
        )
        assert scored_tokens(lists) == (
            Token("a", -9999.0),
            Token("b", -2.0, (("b", -2.0),)),
        )
        with pytest.raises(ValueError, match="2 tokens, 1 token_logprobs"):
            scored_tokens(Logprobs(tokens=["a", "b"], token_logprobs=[-1.0]))
