"""Many requests from a file, without HTTP: OpenAI's batch format, answered by the routes of the
server.

A line of the input is a request: `custom_id`, `method`, `url` and `body`. A line of the output is
what became of it: `custom_id`, and `response` with `status_code` and `body`. Lines come in the
order in which they are ready. A run that was ended in any way is taken up again where it stopped:
requests whose line is whole in the output are not asked again, and half a line at its end is
dropped.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from uuid import uuid4

import msgspec

from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.remote.client import EngineClient
from headrace.remote.engine import RemoteEngine
from headrace.remote.errors import EngineDeadError
from headrace.server.app import make_app
from headrace.server.asgi_app import AsgiApp
from headrace.server.http_exchange import Message
from headrace.server.settings import Settings
from headrace.server.startup import start_server

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_AHEAD = 2
"""Requests under way for each sequence that can run: some are being read while others are answered.
"""
_TRIES = 3
_PAUSE = 0.1


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the input."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_lines(path: Path) -> list[tuple[str, int]]:
    """The id of each request, and where its line begins. Raises RequestError, which names the line,
    for one that cannot be run.
    """
    found: list[tuple[str, int]] = []
    seen: dict[str, int] = {}
    place = 0
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                custom_id = _checked(line, f"{path}:{number}").custom_id
                if custom_id in seen:
                    raise RequestError(
                        f"{path}:{number}: custom_id {custom_id!r} is that of line "
                        f"{seen[custom_id]:,}"
                    )
                seen[custom_id] = number
                found.append((custom_id, place))
            place += len(line)
    return found


def answered_ids(path: Path) -> set[str]:
    """The requests whose lines are whole in the output; what stands behind the last whole line is
    cut off. Raises RequestError.
    """
    done: set[str] = set()
    if not path.exists():
        return done
    whole = 0
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                done.add(msgspec.json.decode(line, type=dict[str, Any])["custom_id"])
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                raise RequestError(
                    f"{path}:{number} is no answer of a batch, so nothing is added to "
                    f"this file: {error}"
                ) from None
            whole += len(line)
    os.truncate(path, whole)
    return done


def run_batch(
    model: str,
    config: EngineConfig,
    settings: Settings,
    source: Path,
    target: Path,
    told: Callable[[int, int], None],
) -> tuple[int, int]:
    """Answer all requests that have no answer yet; returns how many were answered now, and how many
    of them with an error.

    `told` hears how many are done of how many. Raises RequestError for files that are none,
    EngineStartError, EngineDeadError if the engine ends too often.
    """
    every = read_lines(source)
    done = answered_ids(target)
    left = [place for custom_id, place in every if custom_id not in done]
    told(len(every) - len(left), len(every))
    if not left:
        return 0, 0
    return asyncio.run(
        _run(
            model,
            config,
            settings,
            source,
            target,
            left,
            lambda count: told(len(every) - len(left) + count, len(every)),
        )
    )


async def _run(
    model: str,
    config: EngineConfig,
    settings: Settings,
    source: Path,
    target: Path,
    left: list[int],
    told: Callable[[int], None],
) -> tuple[int, int]:
    count = failed = 0
    with _opened(source) as lines, target.open("ab", buffering=0) as answers:
        async with start_server(
            model, config, settings, EngineClient(model, config, {}, settings.stall_seconds)
        ) as served:
            app, places, info = make_app(served), iter(left), served.engine.info
            assert info, "the engine has started"

            async def lane() -> None:
                nonlocal count, failed
                for place in places:
                    lines.seek(place)
                    asked = _checked(lines.readline(), str(source))
                    answer = await _answer(app, asked, served.engine)
                    answers.write(msgspec.json.encode(answer) + b"\n")
                    count, failed = count + 1, failed + (answer["response"]["status_code"] != 200)
                    told(count)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(left), _AHEAD * info.max_num_seqs)):
                        group.create_task(lane())
            except* EngineDeadError as errors:
                raise errors.exceptions[0] from None
    return count, failed


async def _answer(app: AsgiApp, asked: BatchLine, engine: RemoteEngine) -> dict[str, Any]:
    """What the route answers. A request whose engine ended under it is asked again, some times.
    Raises EngineDeadError.
    """
    for _ in range(_TRIES):
        status, body = await _ask(app, asked)
        if status != 503:
            break
        while engine.state in ("loading", "stalled"):
            await asyncio.sleep(_PAUSE)
        if engine.state == "dead":
            raise EngineDeadError("the engine ended too often; run the same command again to go on")
    response = {"status_code": status, "request_id": uuid4().hex, "body": msgspec.Raw(body)}
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": asked.custom_id,
        "response": response,
        "error": None,
    }


async def _ask(app: AsgiApp, asked: BatchLine) -> tuple[int, bytes]:
    """Status and body of one try."""
    body = msgspec.json.encode(asked.body)
    sent: list[Message] = []

    async def receive() -> Message:
        if asked_for.is_set():
            await asyncio.Event().wait()  # a client that never leaves
        asked_for.set()
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    asked_for = asyncio.Event()
    await app(
        {
            "type": "http",
            "path": asked.url,
            "method": asked.method,
            "headers": [(b"host", b"localhost")],
        },
        receive,
        send,
    )
    return sent[0]["status"], b"".join([message.get("body", b"") for message in sent[1:]])


def _checked(line: bytes, where: str) -> BatchLine:
    try:
        asked = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{where}: {error}") from None
    if asked.method != "POST" or asked.url not in URLS:
        raise RequestError(
            f"{where}: a request is a POST to {', '.join(URLS)}, not {asked.method} {asked.url}"
        )
    if asked.body.get("stream"):
        raise RequestError(f"{where}: a batch has no streams")
    return asked


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
