"""Routes of a worker for its trusted frontend, whose requests pass no other checks."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from time import monotonic

import msgspec

from headrace.remote import frames
from headrace.remote.errors import EngineError, RefusedError
from headrace.remote.replica_status import ReplicaStatus, encode_status
from headrace.remote.stream import Stream
from headrace.server.errors import invalid
from headrace.server.http_exchange import HttpExchange
from headrace.server.state import ServerState

STATUS_SECONDS = 0.25
_QUIET_SECONDS = 10.0
"""Seconds without an event after which `Accepted` is sent again: proxies end silent responses."""
_HEADERS = {
    "content-type": "application/octet-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def generate(http: HttpExchange, state: ServerState) -> None:
    """Run the request in a `frames.Add`; the response is a stream of frames.

    The first frame is `Accepted` or `Refused`, the last is `Ended` or `Refused`. Closing the
    connection aborts the request.
    """
    request = _read(await http.read_body(frames.CONTENT_TYPE))
    timeout = state.settings.request_timeout
    if request.options.timeout is not None:
        timeout = min(timeout, request.options.timeout)
    options = replace(request.options, timeout=timeout)

    begun = monotonic()
    with state.admit(http, request.num_sequences):
        submission = state.engine.submit(msgspec.structs.replace(request, options=options))
        try:
            stream = await http.while_connected(submission)
        except RefusedError as error:
            refused = frames.Refused(request.id, error.kind, str(error))
            return await http.respond_bytes(frames.encode(refused), _HEADERS["content-type"])
        http.record.model = options.adapter or state.settings.model_name
        http.record.prompt_tokens = len(request.prompt_token_ids)
        try:
            await http.stream_bytes(_frames(stream), _HEADERS)
        finally:
            stream.close()
            http.record.add_stream(stream)
            state.metrics.stream_ended(stream, monotonic() - begun)


async def status(http: HttpExchange, state: ServerState) -> None:
    """Stream the worker's `ReplicaStatus`, several per second, until the worker ends."""
    await http.stream_bytes(_statuses(state), _HEADERS)


def _read(body: bytes) -> frames.Add:
    try:
        command = frames.read_command(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not a frame: {error}") from None
    if not isinstance(command, frames.Add):
        raise invalid(f"the frame must be Add, not {type(command).__name__}")
    return command


async def _frames(stream: Stream) -> AsyncGenerator[bytes]:
    accepted = frames.encode(frames.Accepted(stream.id))
    yield accepted
    try:
        async for event in stream.events(_QUIET_SECONDS):
            yield accepted if event is None else frames.encode(event)
    except EngineError as error:
        yield frames.encode(frames.Refused(stream.id, "closed", str(error)))


async def _statuses(state: ServerState) -> AsyncGenerator[bytes]:
    while state.engine.state not in ("closed", "dead"):
        yield encode_status(_status(state))
        await asyncio.sleep(STATUS_SECONDS)


def _status(state: ServerState) -> ReplicaStatus:
    engine = state.engine
    assert engine.info is not None, "a served engine has sent its info"
    return ReplicaStatus(
        boot_id=f"{state.boot_id}-{engine.restarts}",
        state=engine.state,
        draining=state.draining,
        info=engine.info,
        report=engine.report,
        adapters=dict(engine.adapters),
        restarts=engine.restarts,
        step_seconds=engine.step_seconds,
        model=state.fingerprint,
        weights=state.weights_digest,
        adapter_digests=dict(engine.adapter_digests),
        max_sequences=state.max_sequences,
        is_full=state.num_sequences >= state.max_sequences,
    )
