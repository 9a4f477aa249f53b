"""An urgent request preempts the ones that fill the server; no response changes."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest

from tests.server.running import Reply, Running, in_background, running, until

USER = [{"role": "user", "content": "hello"}]
CHOICE = {"structured_outputs": {"regex": "[a-z ]{40}"}}
PLACES = 4
NUM_TOKENS = 900


@pytest.fixture(scope="module")
def small(model: str) -> Iterator[Running]:
    """A server with few places, and KV for all of them."""
    places = ("--max-num-seqs", str(PLACES), "--max-waiting", "16")
    yield from running(model, *places, "--threads", "1", "--kv-blocks", "256")


URGENT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 9, "n": 3, "seed": 1}),
    "chat, regex": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 30, "seed": 4, **CHOICE},
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["a", "b c"], "max_tokens": 9, "logprobs": 2, "n": 2, "seed": 2},
    ),
    "scored prompt": (
        "/v1/completions",
        {"prompt": "one two", "max_tokens": 9, "prompt_logprobs": 1, "temperature": 0},
    ),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 20, "seed": 3}),
}
WHOLE = ("scored prompt",)
"""Requests that have no stream."""
CHANGING = {"id", "created", "created_at", "completed_at", "timing"}


def steady(value: Any) -> Any:
    """A response without its ids and times, and without the number of cached tokens."""
    if isinstance(value, dict):
        return {
            name: steady(item)
            for name, item in value.items()
            if name not in CHANGING and not name.endswith("_tokens_details")
        }
    return [steady(item) for item in value] if isinstance(value, list) else value


def streamed_text(reply: Reply) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in reply.events:
        if event == "[DONE]":
            continue
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        if event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
    return texts


def filling(number: int, **more: Any) -> dict[str, Any]:
    """A request that takes a place: every second one is streamed, with a common prompt."""
    prompt = "a preface that all of these have " * 2 + str(number)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number}
    return body | {"logprobs": 5, "stream": number % 2 == 1, **more}


def is_full(server: Running, replies: list[Reply]) -> bool:
    """Whether all places are taken, or the first requests have ended."""
    return server.figures()["headrace_sequences_running"] >= PLACES or len(replies) > 1


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (kind, stream)
        for kind in URGENT
        for stream in (False, True)
        if kind not in WHOLE or not stream
    ],
)
def test_urgent_request_to_a_full_server(small: Running, kind: str, stream: bool) -> None:
    path, body = URGENT[kind]
    body = {"stream": stream, **body}
    alone = small.post(path, body)
    expected = [small.post("/v1/completions", filling(number)) for number in range(2)]
    for attempt in count():
        assert attempt < 20, "no request was preempted"
        before = small.figures()
        calls = [
            partial(small.post, "/v1/completions", filling(number % 2, priority=5))
            for number in range(PLACES)
        ]
        replies, threads = in_background(calls)
        until(partial(is_full, small, replies))
        urgent = small.post(path, body | {"priority": -5})
        for thread in threads:
            thread.join()
        assert urgent.status == 200
        if stream:
            assert streamed_text(urgent) == streamed_text(alone)
        else:
            assert steady(urgent.json) == steady(alone.json)
        for reply in replies:
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert streamed_text(reply) == streamed_text(expected[1])
            else:
                assert steady(reply.json) == steady(expected[0].json)
        if small.figures()["headrace_preemptions_total"] > before["headrace_preemptions_total"]:
            break
    until(small.at_rest)
