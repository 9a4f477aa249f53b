"""Clients over plain sockets, many in one event loop."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Answer:
    """A client's view of one request; times in seconds."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    error: str | None = None
    """The code of an error, in the body or as an event."""
    finish_reason: str | None = None
    is_whole: bool = False
    """Whether the body or the stream ended regularly."""
    begun: float = 0.0
    first: float = 0.0
    """From the request to the first chunk."""
    times: list[float] = field(default_factory=list)
    """Time of each chunk on the monotonic clock."""
    seconds: float = 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(
    port: int, path: str, body: Body, *, pieces: int | None = None, seconds: float | None = None
) -> Answer:
    """Send a request, and close the connection after `pieces` chunks or `seconds` seconds.

    A client that is cancelled closes it too, and returns its view so far.
    """
    answer = Answer(begun=time.monotonic())
    with contextlib.suppress(TimeoutError, ConnectionError, asyncio.CancelledError):
        async with asyncio.timeout(seconds):
            await _exchange(answer, port, path, body, pieces)
    answer.seconds = time.monotonic() - answer.begun
    return answer


async def fill(port: int, blocks: int) -> None:
    """Use all KV and 64 connections once, so that all pages are resident."""
    prompts: list[Body] = [
        {"prompt": [100 + i] * 700, "max_tokens": 8, "temperature": 0}
        for i in range(blocks // 20 + 1)
    ]
    await asyncio.gather(*(ask(port, "/v1/completions", body) for body in prompts))
    more: Body = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "stream": True}
    await asyncio.gather(*(ask(port, "/v1/completions", more) for _ in range(64)))


def request(path: str, data: bytes) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def _exchange(answer: Answer, port: int, path: str, body: Body, pieces: int | None) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        data = json.dumps(body).encode()
        writer.write(request(path, data) + data)
        if pieces == 0:
            await writer.drain()
            return
        answer.status = int((await reader.readline()).split()[1])
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(": ")
            answer.headers[name.lower()] = value
        if "content-length" in answer.headers:
            _read_body(
                answer, json.loads(await reader.readexactly(int(answer.headers["content-length"])))
            )
            return
        async for event in _events(answer, reader):
            if not answer.times:
                answer.first = time.monotonic() - answer.begun
            answer.times.append(time.monotonic())
            answer.text += event
            if pieces is not None and len(answer.times) >= pieces:
                return
    finally:
        writer.transport.abort()


def _read_body(answer: Answer, body: Any) -> None:
    answer.is_whole = True
    if "error" in body:
        answer.error = body["error"]["code"]
        return
    choice = body["choices"][0]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    answer.finish_reason = choice["finish_reason"]


async def _events(answer: Answer, reader: asyncio.StreamReader) -> Any:
    """The chunks of the first choice of a stream."""
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            answer.is_whole = True
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = event["error"]["code"]
        elif event["choices"] and event["choices"][0]["index"] == 0:
            choice = event["choices"][0]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                yield piece
