"""A fault at any stage gives its request a clean error and leaves other requests unchanged."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from tests.server.faulty_server import ENDS, MARK, SEEDS, STAGES
from tests.server.running import SECONDS, Running, in_background, running, until

FLAGS = ("--max-num-seqs", "8", "--threads", "1", "--kv-blocks", "256")
NEIGHBOURS = [
    {
        "messages": [{"role": "user", "content": f"hello {i}"}],
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": i,
        "ignore_eos": True,
    }
    | ({"presence_penalty": 1.0, "frequency_penalty": 0.5} if i % 2 else {"n": 2, "logprobs": True})
    for i in range(7)
]


@pytest.fixture(scope="module")
def faulty(model: str) -> Iterator[Running]:
    yield from running(model, *FLAGS, program="tests.server.faulty_server")


@pytest.fixture(scope="module")
def expected(server: Running) -> list[Any]:
    """The neighbours' choices from a server without faults."""
    return [server.post("/v1/chat/completions", body).json["choices"] for body in NEIGHBOURS]


def poisoned_request(stage: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": f"{MARK} {stage}"}],
        "max_tokens": 30,
        "temperature": 0.8,
        "ignore_eos": True,
    }
    return body | {"seed": SEEDS[stage], "max_tokens": 13 if stage == "result" else 30}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_fault_fails_only_its_request(
    faulty: Running, expected: list[Any], stage: str, streamed: bool
) -> None:
    replies, threads = in_background(
        [partial(faulty.post, "/v1/chat/completions", body) for body in NEIGHBOURS]
    )
    body = poisoned_request(stage) | {"stream": streamed}
    reply = faulty.post("/v1/chat/completions", body)
    for thread in threads:
        thread.join(SECONDS)
    if stage == "event" and not streamed:
        assert reply.status == 200  # the response has no events
    else:
        error = reply.events[-2]["error"] if reply.status == 200 else reply.json["error"]
        assert (error["code"], reply.status in (200, 500)) == ("internal_error", True), reply.body
        assert not re.search(rb"0x[0-9a-f]{6,}|/home/|\.py|Planned", reply.body)
        if reply.status == 500:
            assert reply.headers["x-should-retry"] == "false"
    assert sorted(str(reply.json["choices"]) for reply in replies) == sorted(map(str, expected))
    until(faulty.at_rest)
    assert faulty.get("/health").json["restarts"] == 0


def is_ready(server: Running, restarts: int) -> bool:
    health = server.get("/health/ready")
    return health.status == 200 and health.json["restarts"] == restarts


@pytest.mark.parametrize("stage", ENDS)
def test_request_that_kills_the_engine_is_quarantined(
    model: str, expected: list[Any], stage: str
) -> None:
    """A request may kill the engine twice, with a client that retries; then it is refused."""
    for faulty in running(model, *FLAGS, program="tests.server.faulty_server"):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{faulty.port}/v1", api_key="none") as client:
            ask = partial(
                client.chat.completions.create,
                model="tiny.gguf",
                extra_body=poisoned_request(stage),
                messages=[],
            )
            noise = [unseeded(faulty) for _ in range(3)]
            for restarts, code in enumerate(
                ["engine_dead", "engine_dead", "request_quarantined", "request_quarantined"], 1
            ):
                with pytest.raises(openai.InternalServerError) as error:
                    ask()
                assert error.value.code == code
                until(lambda faulty=faulty, count=restarts: is_ready(faulty, min(count, 2)))
        for body, choices in zip(NEIGHBOURS[:2], expected, strict=False):
            assert faulty.post("/v1/chat/completions", body).json["choices"] == choices
        noise += [unseeded(faulty) for _ in range(3)]
        assert len(set(noise)) == 6, "an engine that restarts repeats no noise"


def unseeded(server: Running) -> str:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 1, "ignore_eos": True}
    return str(server.post("/v1/completions", body).json["choices"][0]["text"])


def test_neighbours_of_a_killing_request_are_served_after_retry(
    model: str, expected: list[Any]
) -> None:
    for faulty in running(model, *FLAGS, program="tests.server.faulty_server"):
        bodies = [*NEIGHBOURS, poisoned_request("death")]
        replies, threads = in_background(
            [
                partial(faulty.post, "/v1/chat/completions", body | {"max_tokens": 2000})
                for body in bodies
            ]
        )
        for thread in threads:
            thread.join(SECONDS)
        assert {reply.status for reply in replies} <= {200, 503} and any(
            reply.status == 503 for reply in replies
        )
        until(lambda faulty=faulty: faulty.get("/health/ready").status == 200)
        replies, threads = in_background(
            [partial(faulty.post, "/v1/chat/completions", body) for body in NEIGHBOURS]
        )
        for thread in threads:
            thread.join(SECONDS)
        assert sorted(str(reply.json["choices"]) for reply in replies) == sorted(map(str, expected))
