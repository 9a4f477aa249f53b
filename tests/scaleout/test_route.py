"""`headrace route` with two workers, all real processes: its responses equal those of a single
server, even if workers are lost.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.remote import frames
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.checkpoint.conftest import SHAPE, write_tiny_gguf
from tests.scaleout.cluster import (
    LONG,
    WORKER,
    Cluster,
    bodies,
    cluster,
    contents,
    descendants,
    free_port,
    streaming,
)
from tests.server.running import SECONDS, Running, alive, engine_of, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
SHORT: dict[str, Any] = {"seed": 3, "max_tokens": 12}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "temperature": 0, **SHORT}),
    ("/v1/completions", {"prompt": ["hello", "you"], "n": 2, "logprobs": 2, **SHORT}),
    (
        "/v1/completions",
        {"prompt": "hello", "echo": True, "logprobs": 1, "prompt_logprobs": 1, **SHORT},
    ),
    ("/v1/completions", {"prompt": "hello", "use_beam_search": True, "n": 3, "max_tokens": 6}),
    (
        "/v1/completions",
        {"prompt": "hello", "stop": ["a", "e"], "ignore_eos": True, "min_tokens": 4, **SHORT},
    ),
    ("/v1/completions", {"prompt": "hello", "structured_outputs": {"regex": "[0-9]{3}"}, **SHORT}),
    (
        "/v1/completions",
        {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}, **SHORT},
    ),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, **SHORT}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2, **SHORT}),
    ("/v1/messages", CHAT | {"max_tokens": 8, "temperature": 0}),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 8, "temperature": 0}),
    ("/v1/embeddings", {"input": ["hello", "you"]}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 10**9}),
    ("/v1/completions", {"prompt": "hello", "temperature": -1}),
    ("/v1/completions", {"prompt": [10**6], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hello", "model": "other"}),
    ("/v1/completions", {"prompt": [2**70], "max_tokens": 4}),
    ("/v1/completions", {"prompt": [-1], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hello", "logit_bias": {"100000": 1}}),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
    ),
]
_VARYING = ("id", "created", "timing", "created_at", "completed_at", "system_fingerprint", "usage")
"""Fields that differ between equal responses; `usage` has the cached tokens."""


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[Cluster]:
    """A cluster for tests that do not change it."""
    with cluster(model) as pair:
        yield pair


@cache
def undisturbed(model: str) -> list[Any]:
    """Contents of all long streams from one server."""
    server = Running(model, "--threads", "1", "--kv-blocks", "1024", "--max-num-seqs", "16")
    try:
        return [contents(server.post("/v1/completions", body)) for body in bodies()]
    finally:
        server.stop()


def without_varying(value: Any) -> Any:
    """A response without the fields that differ between equal responses."""
    if isinstance(value, dict):
        return {name: without_varying(item) for name, item in value.items() if name not in _VARYING}
    return [without_varying(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "body"), REQUESTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_responses_equal_those_of_one_server(
    pair: Cluster, path: str, body: dict[str, Any]
) -> None:
    ours, theirs = pair.frontend.post(path, body), pair.workers[0].post(path, body)
    assert ours.status == theirs.status
    if body.get("stream"):
        assert choices_of(ours.events) == choices_of(theirs.events)
    else:
        assert without_varying(ours.json) == without_varying(theirs.json)


def choices_of(events: list[Any]) -> Any:
    """Text and finish reasons of a stream, by choice."""
    choices: dict[int, Any] = {}
    assert events[-1] == "[DONE]"
    for choice in [choice for event in events[:-1] for choice in event["choices"]]:
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        before, ends = choices.get(choice["index"], ("", []))
        choices[choice["index"]] = before + text, [*ends, *filter(None, [choice["finish_reason"]])]
    return choices


def test_status_routes_of_a_frontend(pair: Cluster) -> None:
    for path in (
        "/health",
        "/health/live",
        "/version",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/stats",
        "/stats/blocks",
        "/",
    ):
        assert pair.frontend.get(path).status == 200, path
    assert pair.num_workers() == 2
    assert len(pair.frontend.get("/stats/blocks").json["groups"]) == 2
    assert "/worker/generate" not in pair.frontend.get("/openapi.json").json["paths"]
    assert pair.frontend.post("/worker/generate", {}).status == 404, "a frontend is no worker"


def test_requests_without_a_seed_sample_the_tokens_of_one_server(model: str) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 1}
    seed = ("--seed", "5")
    single = Running(model, "--threads", "1", "--kv-blocks", "64", *seed)
    try:
        expected = [single.post("/v1/completions", body).json["choices"] for _ in range(3)]
    finally:
        single.stop()
    with cluster(model, route=seed) as pair:
        assert [
            pair.frontend.post("/v1/completions", body).json["choices"] for _ in range(3)
        ] == expected


def test_common_prompt_goes_to_the_worker_that_has_it_cached(pair: Cluster) -> None:
    body = {"prompt": "the same long beginning " * 40, "max_tokens": 2, "temperature": 0}
    cached = [
        pair.frontend.post("/v1/completions", body).json["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for _ in range(4)
    ]
    assert cached[0] == 0 and min(cached[1:]) > 0


def test_connections_to_workers_are_reused(pair: Cluster) -> None:
    """The count includes recently closed connections."""
    ports = {f"{worker.port:04X}" for worker in pair.workers}

    def connections() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {local for _, local, remote, *_ in rows if remote.rpartition(":")[2] in ports}

    before = connections()
    for i in range(12):
        assert (
            pair.frontend.post(
                "/v1/completions", {"prompt": f"hello {i}", "stream": i % 2 == 0, **SHORT}
            ).status
            == 200
        )
    assert len(connections() - before) <= len(pair.workers)


def test_client_that_disconnects_aborts_its_request(pair: Cluster) -> None:
    connection = pair.frontend.open_stream("/v1/completions", LONG | {"max_tokens": 4000})
    assert connection.recv(1000)
    connection.close()
    until(lambda: all(worker.at_rest() for worker in pair.workers))


class TestLostWorkers:
    def test_killed_worker(self, slow: str) -> None:
        """Another worker at the same URL is used after it."""
        with cluster(slow) as two:
            with streaming(two.frontend) as streams:
                worker = two.busy(streams)
                left = descendants(worker)
                worker.stop(signal.SIGKILL)
            assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
            until(lambda: not any(map(alive, left)))
            until(lambda: two.num_workers() == 1)
            again = Running(slow, *WORKER, "--port", str(worker.port))
            try:
                until(lambda: two.num_workers() == 2)
                (other,) = [server for server in two.workers if server is not worker]
                with streaming(two.frontend) as streams:
                    streams.wait()
                    other.stop(signal.SIGKILL)
                assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
                until(lambda: again.figures()["headrace_generated_tokens_total"] > 0)
            finally:
                again.stop()

    def test_killed_engine_of_a_worker(self, slow: str) -> None:
        with cluster(slow) as two:
            with streaming(two.frontend) as streams:
                engine = engine_of(two.busy(streams).process.pid)
                subprocess.run(["kill", "-9", str(engine)], check=True)
            assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
            until(lambda: two.frontend.get("/health").json["restarts"] == 1)

    def test_stopped_worker_that_continues(self, slow: str) -> None:
        """It is lost after some seconds, and used again when it continues."""
        with cluster(slow) as two:
            with streaming(two.frontend) as streams:
                worker = two.busy(streams)
                worker.process.send_signal(signal.SIGSTOP)
                blocks = two.frontend.get("/stats/blocks")
                assert (blocks.status, blocks.json["error"]["code"]) == (503, "no_replica")
            assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
            until(lambda: two.num_workers() == 1)
            worker.process.send_signal(signal.SIGCONT)
            until(lambda: two.num_workers() == 2)
            until(worker.at_rest)

    @pytest.mark.parametrize("seconds", [30, 0])
    def test_worker_that_drains(self, slow: str, seconds: int) -> None:
        """Without time to drain, its requests continue on the other worker."""
        with cluster(slow, flags=("--drain-seconds", str(seconds))) as two:
            with streaming(two.frontend) as streams, ThreadPoolExecutor(1) as pool:
                worker = two.busy(streams)
                ending = pool.submit(worker.stop)
                later = [
                    two.frontend.post("/v1/completions", {"prompt": "more", **SHORT})
                    for _ in range(5)
                ]
            assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
            assert [reply.status for reply in later] == [200] * 5
            assert ending.result() == 0

    def test_no_worker_left(self, slow: str) -> None:
        """Requests wait up to a limit and are then refused; a new worker gets new requests."""
        with cluster(slow, 1, route=("--worker-wait", "1")) as single:
            single.workers[0].stop(signal.SIGKILL)
            refused = single.frontend.post("/v1/completions", {"prompt": "hello", **SHORT})
            assert (refused.status, refused.json["error"]["code"]) == (
                503,
                "no_replica",
            ) and "retry-after" in refused.headers
            health = single.frontend.get("/health")
            assert (health.status, health.json["status"]) == (503, "stalled")
            assert single.frontend.get("/health/live").status == 200
            again = Running(slow, *WORKER, "--port", str(single.workers[0].port))
            try:
                until(lambda: single.frontend.get("/health").status == 200)
                assert (
                    single.frontend.post("/v1/completions", {"prompt": "hello", **SHORT}).status
                    == 200
                )
            finally:
                again.stop()


class TestUnusableWorkers:
    def failure(self, model: str, *flags: str) -> tuple[int, str]:
        """Exit code and last line of a frontend that cannot start."""
        command = [sys.executable, "-m", "headrace", "route", model, "--port", "0", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()[-1]

    def test_worker_with_another_model(self, pair: Cluster, tmp_path: Path) -> None:
        """The other model has the same shapes and vocabulary."""
        weights = {"output_norm.weight": np.full(SHAPE["dim"], 1.01, np.float32)}
        other = write_tiny_gguf(tmp_path / "tiny.gguf", {"llama.context_length": 4096}, weights)
        code, message = self.failure(
            str(other), "--workers", f"http://127.0.0.1:{pair.workers[0].port}"
        )
        assert (
            code == 1
            and "serves another model or tokenizer: start it with the same MODEL" in message
        )

    def test_worker_with_another_kv_dtype_and_other_instructions(self, model: str) -> None:
        env = {"HEADRACE_ISA": "portable"}
        other = Running(model, *WORKER, "--kv-dtype", "f32", env=env)
        workers = [Running(model, *WORKER), other]
        urls = ",".join(f"127.0.0.1:{worker.port}" for worker in workers)
        try:
            frontend = Running(model, "--workers", urls, command="route")
            try:
                until(
                    lambda: any(
                        "differs from the first worker" in line
                        and "kv_dtype" in line
                        and "'portable'" in line
                        for line in frontend.log
                    )
                )
                assert frontend.post("/v1/completions", {"prompt": "hello", **SHORT}).status == 200
                until(
                    lambda: frontend.figures()["headrace_generated_tokens_total"] > 0
                )  # it has another status of both workers
                assert sum("differs from the first worker" in line for line in frontend.log) == 1
            finally:
                frontend.stop()
        finally:
            for worker in workers:
                worker.stop()

    def test_server_that_is_no_worker_and_missing_key(self, model: str) -> None:
        plain = Running(model, "--threads", "1", "--kv-blocks", "64", "--api-key", "secret")
        try:
            url = f"http://127.0.0.1:{plain.port}"
            code, message = self.failure(model, "--workers", url)
            assert code == 1 and "set --worker-key to an API key of that worker" in message
            code, message = self.failure(model, "--workers", url, "--worker-key", "secret")
            assert code == 1 and "is no worker: start it with `headrace serve --worker`" in message
            assert (
                plain.request(
                    "POST", "/worker/generate", b"", {"authorization": "Bearer secret"}
                ).status
                == 404
            )
        finally:
            plain.stop()

    def test_worker_key_and_a_worker_that_starts_later(self, model: str) -> None:
        first = Running(model, *WORKER, "--api-key", "secret")
        port = free_port()
        try:
            urls = f"http://127.0.0.1:{first.port},http://127.0.0.1:{port}"
            frontend = Running(
                model, "--workers", urls, env={"HEADRACE_WORKER_KEY": "secret"}, command="route"
            )
            try:
                assert (
                    first.request(
                        "POST", "/worker/generate", b"", {"content-type": "application/msgpack"}
                    ).status
                    == 401
                )
                assert first.get("/worker/status").status == 401
                two = Cluster([first], frontend)
                assert two.num_workers() == 1
                second = Running(model, *WORKER, "--api-key", "secret", "--port", str(port))
                try:
                    until(lambda: two.num_workers() == 2)
                finally:
                    second.stop()
                until(lambda: two.num_workers() == 1)
            finally:
                frontend.stop()
        finally:
            first.stop()


def write_adapter(folder: Path) -> Path:
    """A random adapter of the tiny model."""
    rng, dim = np.random.default_rng(0), SHAPE["dim"]
    halves = {
        "A": rng.standard_normal((4, dim), np.float32),
        "B": rng.standard_normal((dim, 4), np.float32),
    }
    folder.mkdir()
    parts = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": values
        for half, values in halves.items()
    }
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    return folder


def test_adapters_are_loaded_on_all_workers_and_survive_a_loss(model: str, tmp_path: Path) -> None:
    loaded = {"lora_name": "one", "lora_path": str(write_adapter(tmp_path / "one"))}
    body = {
        "prompt": "hello",
        "model": "one",
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    with cluster(
        model, flags=("--allow-adapter-changes",), route=("--allow-adapter-changes",)
    ) as two:
        assert two.frontend.post("/v1/completions", body).status == 404
        assert (
            two.frontend.post("/v1/load_lora_adapter", loaded | {"lora_path": "/nowhere"}).status
            == 400
        )
        assert two.frontend.post("/v1/load_lora_adapter", loaded).status == 200
        assert [entry["id"] for entry in two.frontend.get("/v1/models").json["data"]] == [
            "tiny.gguf",
            "one",
        ]
        choices = [
            server.post("/v1/completions", body).json["choices"]
            for server in (two.frontend, *two.workers)
        ]
        assert (
            choices[0]
            == choices[1]
            == choices[2]
            != two.frontend.post("/v1/completions", body | {"model": "tiny.gguf"}).json["choices"]
        )
        killed, other = two.workers
        killed.stop(signal.SIGKILL)
        assert two.frontend.post("/v1/completions", body).json["choices"] == choices[0]
        again = Running(model, *WORKER, "--allow-adapter-changes", "--port", str(killed.port))
        try:
            until(lambda: len(again.get("/v1/models").json["data"]) == 2)
            other.stop(signal.SIGKILL)
            assert two.frontend.post("/v1/completions", body).json["choices"] == choices[0]
            unloaded = two.frontend.post("/v1/unload_lora_adapter", {"lora_name": "one"})
            assert unloaded.status == 200
            assert two.frontend.post("/v1/completions", body).status == 404
            assert len(again.get("/v1/models").json["data"]) == 1
        finally:
            again.stop()


def tokens_of(events: list[frames.Event]) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, frames.StepOutput)
        for token in event.token_ids
    ]


class TestGenerateRouteOfAWorker:
    REQUEST = frames.Add(
        id="7",
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        options=RequestOptions(cache_salt="salt"),
    )

    def post(
        self, pair: Cluster, body: bytes, content_type: str = "application/msgpack"
    ) -> tuple[int, list[frames.Event]]:
        reply = pair.workers[0].request(
            "POST", "/worker/generate", body, {"content-type": content_type}
        )
        if reply.status != 200:
            return reply.status, []
        bodies = frames.bodies(bytearray(reply.body))
        return reply.status, [frames.read_event(body) for body in bodies]

    def test_events_and_continued_output(self, pair: Cluster) -> None:
        status, (first, *outputs, last) = self.post(pair, msgspec.msgpack.encode(self.REQUEST))
        assert (
            status == 200 and isinstance(first, frames.Accepted) and isinstance(last, frames.Ended)
        )
        tokens = tokens_of(outputs)
        assert len(tokens) == 4
        continued = msgspec.structs.replace(self.REQUEST, output_token_ids=[tokens[:3]])
        _, (_, *rest, _) = self.post(pair, msgspec.msgpack.encode(continued))
        assert tokens_of(rest) == tokens[3:]

    def test_invalid_requests_are_refused(self, pair: Cluster) -> None:
        too_long = msgspec.structs.replace(self.REQUEST, output_token_ids=[[1, 2, 3, 4, 5]])
        status, events = self.post(pair, msgspec.msgpack.encode(too_long))
        assert status == 200 and [type(event) for event in events] == [frames.Refused]
        assert isinstance(events[0], frames.Refused) and "at most 4 may follow" in events[0].message
        for body in (
            b"",
            b"\xff" * 100,
            b"\x91" * 5000,
            msgspec.msgpack.encode(frames.Abort("7")),
            msgspec.msgpack.encode({"id": 3}),
        ):
            assert self.post(pair, body)[0] == 400
        assert self.post(pair, msgspec.msgpack.encode(self.REQUEST), "application/json")[0] == 415
        wrong = msgspec.msgpack.encode(
            ["Add", "7", [1], {"temperature": -1}, None, 0, None, None, None]
        )
        assert self.post(pair, wrong)[0] == 400
        until(pair.workers[0].at_rest)


def test_many_streams_leave_no_request_running(slow: str) -> None:
    with cluster(slow) as pair:
        with streaming(pair.frontend) as streams:
            streams.wait()
        assert [contents(stream.result()) for stream in streams] == undisturbed(slow)
        until(lambda: all(worker.at_rest() for worker in pair.workers))
