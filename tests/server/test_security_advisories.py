"""Published security advisories of other servers, tested against this one.

Other classes are elsewhere: API keys, hosts and routes (`test_http.py`), faults
(`test_fault_injection.py`, `test_overload_and_shutdown.py`), structured output
(`test_structured_output.py`), parsers (`output_parsers/`), log lines (`test_request_log.py`),
templates, tokenizers and files (`tests/checkpoint`, `tests/fuzz`).
"""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.server.app import make_app
from headrace.server.metrics import Metrics
from headrace.server.settings import Settings
from tests.server.running import SECONDS, Running, in_background

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
}


@pytest.mark.parametrize("number", ["n", "max_tokens", "top_logprobs", "min_tokens", "top_k"])
@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**30, -(2**31), -1 << 63])
def test_out_of_range_numbers_are_refused(server: Running, number: str, value: int) -> None:
    """CVE-2026-34756, CVE-2026-21869: refused before allocation, never negative in C++."""
    reply = server.post("/v1/chat/completions", CHAT | {number: value, "logprobs": True})
    assert reply.status == 400, reply.body


def test_million_prompts_are_refused(server: Running) -> None:
    """CVE-2026-73559."""
    for prompts in (["a"] * 300_000, [[1]] * 300_000):
        assert server.post("/v1/completions", {"prompt": prompts, "max_tokens": 1}).status == 400
    assert server.post("/v1/embeddings", {"input": ["a"] * 300_000}).status == 400


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias", "prompt"])
def test_token_ids_beyond_the_vocabulary_are_refused(server: Running, field: str) -> None:
    """CVE-2026-93840: ids are checked against the width of the logits; neighbours are
    unaffected.
    """
    width = server.get("/stats").json["engine"]["vocab_size"]
    body = CHAT | {"max_tokens": 200}
    expected = server.post("/v1/chat/completions", body).json["choices"]
    replies, threads = in_background([lambda: server.post("/v1/chat/completions", body)] * 3)
    for token, status in ((width - 1, 200), (width, 400), (2**31, 400), (-1, 400)):
        given = {str(token): 1} if field == "logit_bias" else [token]
        request = (
            {"prompt": given, "max_tokens": 1}
            if field == "prompt"
            else {"prompt": "hello", "max_tokens": 1, field: given}
        )
        assert server.post("/v1/completions", request).status == status, token
    for thread in threads:
        thread.join(SECONDS)
    assert [reply.json["choices"] for reply in replies] == [expected] * 3


@pytest.mark.parametrize(
    "text", ["a" * 5_000_000, "_" * 1_000_000, " " * 1_000_000, "a\n" * 500_000, "\u0300" * 400_000]
)
def test_long_texts_are_refused_before_tokenization(server: Running, text: str) -> None:
    """CVE-2025-46570 and other quadratic tokenizers: other requests are served meanwhile."""
    errors: list[Any] = []
    done = threading.Event()

    def post_others() -> None:
        while not done.is_set():
            if (status := server.get("/health").status) != 200:
                errors.append(status)

    thread = threading.Thread(target=post_others)
    thread.start()
    replies = [
        server.post("/v1/completions", {"prompt": text}),
        server.post("/tokenize", {"prompt": text}),
    ]
    replies.append(
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    )
    done.set()
    thread.join(SECONDS)
    assert [(reply.status, reply.json["error"]["type"]) for reply in replies] == [
        (400, "invalid_request_error")
    ] * 3 and not errors


def test_code_and_tensors_in_requests_are_ignored(server: Running) -> None:
    """CVE-2026-7304, CVE-2025-62164, PYSEC-2026-4344: nothing is run or unpickled."""
    plain = server.post("/v1/chat/completions", CHAT).json["choices"]
    code = {
        "logits_processors": ["os.system"],
        "custom_logit_processor": "gASV",
        "prompt_embeds": "gASV",
        "chat_template": "{{ 1/0 }}",
    }
    for name, value in code.items():
        reply = server.post("/v1/chat/completions", CHAT | {name: value})
        assert reply.status == 400 or reply.json["choices"] == plain, name
    for name in (
        "messages",
        "add_generation_prompt",
        "tools",
        "bos_token",
        "tokenize",
        "chat_template",
        "raise_exception",
    ):
        reply = server.post("/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: True}})
        assert reply.status == 400 or reply.json["choices"] == plain, name


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/a.png",
        "https://x/a.png",
        "file:///etc/passwd",
        "ftp://x/y",
        "data:image/png;base64,AAAA",
    ],
)
def test_urls_in_requests_are_not_fetched(server: Running, url: str) -> None:
    """CVE-2025-6242, CVE-2026-24779: refused by the name of their field."""
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "messages")
    assert url.encode() not in reply.body


def test_websockets_and_mount_paths_are_ignored() -> None:
    """CVE-2026-48710: other scopes are dropped, and the mount path does not change the routes."""

    engine: Any = SimpleNamespace()
    metrics = Metrics(engine, "m")
    served: Any = SimpleNamespace(settings=Settings(api_keys=("k",)), metrics=metrics)
    app, sent = make_app(served), list[Any]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "websocket", "path": "/v1/models", "headers": []}, receive, send))
    assert not sent
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "root_path": "/health",
        "headers": [(b"host", b"x/health")],
    }
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 401
