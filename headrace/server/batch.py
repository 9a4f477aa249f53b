"""Runs a file of requests in OpenAI's batch format, without HTTP.

A resumed batch skips requests with a complete line in the output. The noise of a request without
a seed follows from its custom_id, so a resumed batch has the responses of an uninterrupted one.
"""

import asyncio
import os
import signal
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from uuid import uuid4

import msgspec

from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.remote.client import EngineClient
from headrace.remote.errors import EngineDeadError
from headrace.sampling.sampler import derive_seed
from headrace.server.app import make_app
from headrace.server.asgi_app import AsgiApp
from headrace.server.file_lock import locked_for_append
from headrace.server.http_exchange import BASE_SEED, Message
from headrace.server.settings import Settings
from headrace.server.startup import start_server
from headrace.server.state import ServerState

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
)
_REQUESTS_PER_SEQUENCE = 2
"""Some requests are tokenized while others generate."""
_MAX_TRIES = 3
_POLL_SECONDS = 0.1


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_requests(path: Path) -> list[tuple[str, int]]:
    """Return ids and byte offsets. Raises RequestError."""
    requests: list[tuple[str, int]] = []
    line_numbers: dict[str, int] = {}
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                custom_id = _parse(line, f"{path}:{number}").custom_id
                if custom_id in line_numbers:
                    raise RequestError(
                        f"{path}:{number}: custom_id {custom_id!r} is already used in line "
                        f"{line_numbers[custom_id]:,}"
                    )
                line_numbers[custom_id] = number
                requests.append((custom_id, offset))
            offset += len(line)
    return requests


def finished_ids(path: Path) -> set[str]:
    """Return the request ids in the output file, and remove a partial last line.

    Raises RequestError if the file is not the output of a batch.
    """
    finished: set[str] = set()
    if not path.exists():
        return finished
    size = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                finished.add(msgspec.json.decode(line, type=dict[str, Any])["custom_id"])
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                raise RequestError(
                    f"{path}:{number} is not the output of a batch ({error}); "
                    "choose another output file"
                ) from None
            size += len(line)
    os.truncate(path, size)
    return finished


def run_batch(
    model: str,
    config: EngineConfig,
    settings: Settings,
    source: Path,
    target: Path,
    on_progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """Run the requests that have no response; returns the number of responses and of errors.

    `config.seed` is the base seed of requests without one; None means 0. Raises RequestError, also
    if another process writes to `target`, EngineStartError and EngineDeadError. A signal ends the
    run between two lines, and then reaches the handler that it had before.
    """
    requests = read_requests(source)
    if target.exists() and target.samefile(source):
        raise RequestError(f"{target} is the input file; choose another output file")
    with _open(source) as lines, locked_for_append(target) as output:
        return _run_rest(model, config, settings, requests, lines, output, on_progress)


def _run_rest(
    model: str,
    config: EngineConfig,
    settings: Settings,
    requests: list[tuple[str, int]],
    lines: BinaryIO,
    output: BinaryIO,
    on_progress: Callable[[int, int], None],
) -> tuple[int, int]:
    finished = finished_ids(Path(output.name))
    offsets = [offset for custom_id, offset in requests if custom_id not in finished]
    num_finished = len(requests) - len(offsets)
    on_progress(num_finished, len(requests))
    if not offsets:
        return 0, 0

    async def run() -> tuple[int, int]:
        engine = EngineClient(model, config, {}, settings.stall_seconds)
        async with start_server(model, config, settings, engine) as state:
            batch = _Batch(
                state=state,
                seed=config.seed or 0,
                lines=lines,
                output=output,
                on_response=lambda count: on_progress(num_finished + count, len(requests)),
            )
            await batch.run(offsets)
            return batch.num_responses, batch.num_errors

    return _run_until_signal(run())


class _Batch:
    def __init__(
        self,
        *,
        state: ServerState,
        seed: int,
        lines: BinaryIO,
        output: BinaryIO,
        on_response: Callable[[int], None],
    ) -> None:
        self.num_responses = 0
        self.num_errors = 0
        self._engine = state.engine
        self._app = make_app(state)
        self._seed = seed
        self._lines = lines
        self._output = output
        self._on_response = on_response

    async def run(self, offsets: list[int]) -> None:
        assert self._engine.info, "a started engine has sent its info"
        max_running = _REQUESTS_PER_SEQUENCE * self._engine.info.max_num_seqs
        remaining = iter(offsets)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(offsets), max_running)):
                    group.create_task(self._run_all(remaining))
        except* EngineDeadError as errors:
            raise errors.exceptions[0] from None

    async def _run_all(self, offsets: Iterator[int]) -> None:
        for offset in offsets:
            self._lines.seek(offset)
            request = _parse(self._lines.readline(), self._lines.name)
            status, body = await self._run_request(request)
            response = {"status_code": status, "request_id": uuid4().hex, "body": msgspec.Raw(body)}
            line = {
                "id": f"batch_req_{uuid4().hex}",
                "custom_id": request.custom_id,
                "response": response,
                "error": None,
            }
            self._output.write(msgspec.json.encode(line) + b"\n")
            self.num_responses += 1
            self.num_errors += status != 200
            self._on_response(self.num_responses)

    async def _run_request(self, request: BatchRequest) -> tuple[int, bytes]:
        for _ in range(_MAX_TRIES):
            status, body = await _send(
                self._app, request, derive_seed(self._seed, request.custom_id)
            )
            if status != 503:
                break
            while self._engine.state in ("loading", "stalled"):
                await asyncio.sleep(_POLL_SECONDS)
            if self._engine.state == "dead":
                raise EngineDeadError("the engine ended too often; run the same command to resume")
        return status, body


def _run_until_signal(work: Coroutine[Any, Any, tuple[int, int]]) -> tuple[int, int]:
    """Run a coroutine; a signal cancels it, and then goes to its earlier handler."""
    received: list[int] = []

    async def run() -> tuple[int, int]:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def on_signal(number: int) -> None:
            if received:  # a second signal does not wait for the end of the engine
                os._exit(128 + number)
            received.append(number)
            task.cancel()

        for number in previous:
            loop.add_signal_handler(number, on_signal, number)
        return await task

    previous = _signal_handlers()
    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not received:
            raise
        return 0, 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def _signal_handlers() -> dict[int, Any]:
    """Return the handlers of signals that end a process, by number; ignored ones are left out."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    return {number: old for number, old in handlers.items() if old not in (signal.SIG_IGN, None)}


async def _send(app: AsgiApp, request: BatchRequest, seed: int) -> tuple[int, bytes]:
    """Return status and body of the response; `seed` is for a request that sets none."""
    body = msgspec.json.encode(request.body)
    messages: list[Message] = []
    body_received = asyncio.Event()

    async def receive() -> Message:
        if body_received.is_set():
            await asyncio.Event().wait()  # the client never disconnects
        body_received.set()
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "path": request.url,
        "method": request.method,
        "headers": [(b"host", b"localhost")],
        "extensions": {BASE_SEED: seed},
    }
    await app(scope, receive, send)
    parts = [message.get("body", b"") for message in messages[1:]]
    return messages[0]["status"], b"".join(parts)


def _parse(line: bytes, place: str) -> BatchRequest:
    try:
        request = msgspec.json.decode(line.removeprefix(BOM_UTF8), type=BatchRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{place}: {error}") from None
    if request.method != "POST" or request.url not in URLS:
        raise RequestError(
            f"{place}: {request.method} {request.url} is not supported; use POST with "
            f"{', '.join(URLS)}"
        )
    if request.body.get("stream"):
        raise RequestError(f"{place}: stream is not supported in a batch; leave it out")
    return request


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
