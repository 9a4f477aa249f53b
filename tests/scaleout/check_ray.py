"""Replicas on Ray. `make test-ray` runs this, with the extra `ray`."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from headrace import LLM, SamplingParams
from tests.checkpoint.conftest import write_tiny_gguf
from tests.scaleout.on_ray import (
    OnRay,
    command_of,
    descendants,
    ports_open_to_all,
    serving,
    still_there,
    text_of,
)
from tests.server.running import Reply, until

FLAGS = ("--threads", "1", "--kv-blocks", "1024", "--max-num-seqs", "16")
STREAMS = 20
LENGTH = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = write_tiny_gguf(
        tmp_path_factory.mktemp("ray") / "tiny.gguf", {"llama.context_length": 4096}
    )
    return str(path)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[OnRay]:
    with serving(model, "--replicas", "2", *FLAGS) as server:
        yield server


def request_of(number: int, length: int = LENGTH) -> dict[str, Any]:
    """A request with the same response on any replica: greedy, or sampled with a seed and penalties
    of its own output.
    """
    options = (
        {"temperature": 0.8, "seed": number, "frequency_penalty": 0.4, "min_tokens": 20}
        if number % 2
        else {"temperature": 0}
    )
    return {
        "prompt": f"The story of the number {number}: once",
        "max_tokens": length,
        "ignore_eos": True,
        **options,
    }


def alone(model: str, numbers: range, length: int = LENGTH) -> list[str]:
    """Texts of one engine in this process."""
    with LLM(model, threads=1, kv_blocks=1024) as llm:
        prompts, params = [], []
        for number in numbers:
            request = request_of(number, length)
            prompts.append(request.pop("prompt"))
            params.append(SamplingParams(**request))
        return [output.outputs[0].text for output in llm.generate(prompts, params)]


def streamed(server: OnRay, request: dict[str, Any], started: threading.Barrier) -> str:
    """Text of a stream, which is read after all streams have started."""
    connection = server.connect()
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(request | {"stream": True}),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        assert response.status == 200
        first = response.readline()
        started.wait(30)
        return text_of(Reply(200, {}, first + response.read()).events)
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_replica_lost_during_twenty_streams_changes_no_text(
    server: OnRay, model: str, number: int
) -> None:
    expected = alone(model, range(STREAMS))
    started = threading.Barrier(STREAMS + 1)
    before = server.replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [
            pool.submit(streamed, server, request_of(place), started) for place in range(STREAMS)
        ]
        started.wait(30)
        log_start = len(server.log)
        os.kill(before[0], number)
        texts = [answer.result() for answer in answers]
    assert texts == expected
    assert [line for line in server.log[log_start:] if "continues on another one" in line], (
        "no request ran on the lost replica"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(before[0], signal.SIGKILL)
    until(
        lambda: len(server.replicas()) == 2 and before[0] not in server.replicas()
    )  # Ray starts another
    until(lambda: _num_present(server) == 2)


def test_replica_with_another_model_is_not_used(server: OnRay, model: str) -> None:
    """The file is replaced, and a replica restarts."""
    (expected,) = alone(model, range(1), 50)
    kept = Path(model).read_bytes()
    log_start, before = len(server.log), server.replicas()
    try:
        write_tiny_gguf(
            Path(model + ".other"), {"llama.context_length": 4096, "llama.rope.freq_base": 5e5}
        ).replace(model)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: any("another model" in line for line in server.log[log_start:]))
        assert [
            server.post("/v1/completions", request_of(0, 50)).json["choices"][0]["text"]
            for _ in range(6)
        ] == [expected] * 6
    finally:
        Path(model + ".kept").write_bytes(kept)
        Path(model + ".kept").replace(model)
    (other,) = set(server.replicas()) - set(before)
    os.kill(other, signal.SIGKILL)
    until(lambda: _num_present(server) == 2)


def test_common_prompt_goes_to_the_replica_that_has_it_cached(server: OnRay) -> None:
    prompt = (
        "A preface that many requests have in common, of more than a few blocks of "
        "tokens, so that it is worth finding again. " * 3
    )
    cached = []
    for number in range(6):
        reply = server.post(
            "/v1/completions", {"prompt": prompt + str(number), "max_tokens": 2}
        ).json
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 256, cached


def test_client_that_disconnects_aborts_its_request(server: OnRay) -> None:
    connection = server.open_stream("/v1/completions", request_of(0, 3000) | {"stream": True})
    assert connection.recv(100)
    connection.close()
    until(server.at_rest)


def test_engine_refuses_invalid_requests(server: OnRay) -> None:
    reply = server.post("/v1/completions", {"prompt": [999_999], "max_tokens": 2})
    assert reply.status == 400 and "vocabulary" in reply.json["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200


def test_call_without_the_cluster_token_is_refused(server: OnRay) -> None:
    """At the cluster's port, and at the ports of replicas, which Ray binds to all interfaces."""
    (raylet,) = [pid for pid, command in server.below().items() if "/raylet/raylet " in command]
    (address,) = {
        word.partition("=")[2]
        for word in command_of(raylet).split()
        if word.startswith("--gcs-address=")
    }
    variables = dict(
        pair.partition("=")[::2]
        for pair in Path(f"/proc/{raylet}/environ").read_text().split("\0")
        if pair
    )
    open_to_all = {port for pid in server.below() for port in ports_open_to_all(pid)}
    assert address.startswith("127.0.0.1:")
    assert (
        open_to_all == {port for pid in server.replicas() for port in ports_open_to_all(pid)}
        and len(open_to_all) == 2
    )
    targets = [
        (f"127.0.0.1:{port}", "/ray.serve.ASGIService/HandleRequest") for port in open_to_all
    ]
    for target, method in [(address, "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"), *targets]:
        refused = grpc.StatusCode.UNAUTHENTICATED
        assert status_of(target, method, None) == status_of(target, method, "0" * 64) == refused
        assert status_of(target, method, variables["RAY_AUTH_TOKEN"]) != refused


def status_of(target: str, method: str, token: str | None) -> grpc.StatusCode:
    """Status of a call without content."""
    with grpc.insecure_channel(target) as channel:
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            channel.unary_unary(method)(b"", metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_autoscaling_drops_no_request(model: str) -> None:
    flags = (
        "--replicas",
        "1",
        "--max-replicas",
        "2",
        "--scale-up-seconds",
        "1",
        "--scale-down-seconds",
        "2",
    )
    expected = alone(model, range(24), 150)
    with serving(
        model, *flags, "--threads", "1", "--kv-blocks", "1024", "--max-num-seqs", "4"
    ) as server:
        over, quiet = threading.Event(), threading.Event()

        def run_lane(lane: int) -> int:
            count = 0
            while not over.is_set() and not (lane and quiet.is_set()):
                number = (lane + 7 * count) % 24
                reply = server.post("/v1/completions", request_of(number, 150))
                assert reply.status == 200, reply.body
                assert reply.json["choices"][0]["text"] == expected[number]
                count += 1
            return count

        with ThreadPoolExecutor(12) as pool:
            lanes = [pool.submit(run_lane, lane) for lane in range(12)]
            try:
                until(lambda: len(server.replicas()) == 2 or _failed(lanes))
                until(lambda: _num_present(server) == 2 or _failed(lanes))
                quiet.set()  # one lane continues alone
                until(lambda: len(server.replicas()) == 1 or _failed(lanes))
            finally:
                over.set()
            assert all(lane.result() > 0 for lane in lanes)


def test_lost_rank_actor_changes_no_text(model: str) -> None:
    expected = alone(model, range(4), 250)
    with serving(model, "--replicas", "1", "-tp", "2", *FLAGS) as server:
        actors = [
            pid
            for pid, command in server.below().items()
            if command.startswith("ray::RankActor.run")
        ]
        assert len(actors) == 1
        ranks = [
            pid for pid, command in descendants(actors[0]).items() if "rank_process" in command
        ]
        assert len(ranks) == 1
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(server.post, "/v1/completions", request_of(number, 250))
                for number in range(4)
            ]
            until(lambda: server.figures()["headrace_steps_total"] > 20)
            os.kill(actors[0], signal.SIGKILL)
            replies = [answer.result() for answer in answers]
        assert [reply.json["choices"][0]["text"] for reply in replies] == expected
        assert actors[0] not in server.below()


class Cluster(NamedTuple):
    """A running cluster with an application."""

    port: int
    environment: dict[str, str]

    def post(self, body: Any, key: str = "secret") -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = {"threads": 1, "kv_blocks": 1024, "max_num_seqs": 16}
    command = [
        sys.executable,
        "-m",
        "tests.scaleout.a_cluster",
        str(port),
        json.dumps({"model": model, "engine": engine}),
    ]
    env = os.environ | {"HEADRACE_API_KEY": "secret"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as running:
        assert running.stdin and running.stdout
        address, token = json.loads(running.stdout.readline())
        names = {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        yield Cluster(port, names)
        running.stdin.close()


def test_application_responds_at_the_proxy_of_its_cluster(cluster: Cluster, model: str) -> None:
    expected = alone(model, range(3), 100)
    for number in range(3):
        assert cluster.post(request_of(number, 100)).json["choices"][0]["text"] == expected[number]
        assert (
            text_of(cluster.post(request_of(number, 100) | {"stream": True}).events)
            == expected[number]
        )
    assert cluster.post(request_of(0, 100), key="another").status == 401


def test_joining_a_running_cluster_leaves_it_unchanged(cluster: Cluster, model: str) -> None:
    server = OnRay(model, "--replicas", "1", *FLAGS, env=cluster.environment)
    assert (
        server.post("/v1/completions", request_of(1, 100)).json["choices"][0]["text"]
        == alone(model, range(1, 2), 100)[0]
    )
    below = server.below()
    assert not any("raylet" in command for command in below.values())
    assert server.stop() == 0 and not still_there(below)
    assert cluster.post(request_of(0, 10)).status == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_or_file_is_left_after_the_end(model: str, number: int) -> None:
    before = set(Path(tempfile.gettempdir()).glob("headrace-ray-*"))
    server = OnRay(model, "--replicas", "1", *FLAGS)
    below = server.below()
    assert any("raylet" in command for command in below.values())
    started = threading.Barrier(9)
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(streamed, server, request_of(place, 3500), started) for place in range(8)
        ]
        started.wait(30)
        code = server.stop(number)
        assert not still_there(below)
        if number == signal.SIGINT:
            assert code == 0 and all(answer.result() for answer in answers)
        else:
            assert all(answer.exception() for answer in answers)
    until(lambda: set(Path(tempfile.gettempdir()).glob("headrace-ray-*")) == before)


def _num_present(server: OnRay) -> int:
    """Number of replicas with a status."""
    return int(server.figures()["headrace_kv_blocks"]) // 1024


def _failed(lanes: list[Any]) -> bool:
    return any(lane.done() and lane.exception() for lane in lanes)
