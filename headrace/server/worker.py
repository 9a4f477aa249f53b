"""The routes of a worker, for the frontend that it serves: requests as the engine reads them, and
what the worker says of itself.

A frontend is trusted: it chooses the scopes of the prefix cache, and what it sends was not read by
the routes of clients. So these routes are there where the operator asks for them alone.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec

from headrace.remote import frames
from headrace.remote.errors import EngineError, RefusedError
from headrace.remote.replica_status import ReplicaStatus, encode_status
from headrace.remote.stream import Stream
from headrace.server.asgi import Call
from headrace.server.errors import invalid
from headrace.server.served_model import ServedModel

PERIOD = 0.25
"""Seconds between two words of a worker."""
_HEADERS = {
    "content-type": "application/octet-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def generate(served: ServedModel, call: Call) -> None:
    """Run the request of `frames.Add`; the answer is the frames of what comes of it, the first of
    which is `Accepted` or `Refused`.

    The last is `Ended`, or `Refused` of the kind `closed` where the engine ended under it, or the
    worker ends. To close the connection is to end the request.
    """
    asked = _read(await call.read_body(frames.CONTENT_TYPE))
    params = asked.params
    max_timeout, timeout = served.settings.request_timeout, asked.options.timeout
    options = replace(
        asked.options, timeout=max_timeout if timeout is None else min(max_timeout, timeout)
    )
    with served.admitted(call, (params.beam_width or params.n) if params else 1):
        try:
            stream = await call.while_connected(
                served.engine.submit(
                    asked.prompt_token_ids,
                    params,
                    options,
                    pooling=asked.pooling,
                    output_token_ids=asked.output_token_ids,
                )
            )
        except RefusedError as error:
            refused = frames.Refused(asked.id, error.kind, str(error))
            return await call.respond_bytes(frames.encode(refused), _HEADERS["content-type"])
        call.record.model, call.record.prompt_tokens = (
            options.adapter or served.settings.model_name,
            len(asked.prompt_token_ids),
        )
        try:
            await call.stream_bytes(_frames(stream), _HEADERS)
        finally:
            stream.close()
            call.record.add_stream(stream)


async def status(served: ServedModel, call: Call) -> None:
    """What the worker is and does, several times a second, until it ends: `ReplicaStatus`, each
    after its length.
    """
    await call.stream_bytes(_statuses(served), _HEADERS)


def _read(body: bytes) -> frames.Add:
    try:
        asked = frames.read_command(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is no request: {error}") from None
    if not isinstance(asked, frames.Add):
        raise invalid(f"the body is no request, but {type(asked).__name__}")
    return asked


async def _frames(stream: Stream) -> AsyncGenerator[bytes]:
    yield frames.encode(frames.Accepted(stream.id))
    try:
        async for event in stream:
            yield frames.encode(event)
    except EngineError as error:
        yield frames.encode(frames.Refused(stream.id, "closed", str(error)))


async def _statuses(served: ServedModel) -> AsyncGenerator[bytes]:
    while served.engine.state not in ("closed", "dead"):
        yield encode_status(_status(served))
        await asyncio.sleep(PERIOD)


def _status(served: ServedModel) -> ReplicaStatus:
    engine = served.engine
    assert engine.hello is not None, "it is served"
    return ReplicaStatus(
        boot=f"{served.boot}-{engine.restarts}",
        state=engine.state,
        draining=served.draining,
        hello=engine.hello,
        report=engine.report,
        adapters=dict(engine.adapters),
        restarts=engine.restarts,
        step_seconds=engine.step_seconds,
        model=served.fingerprint,
    )
