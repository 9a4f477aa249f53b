"""A proxy before a real server that spoils some of its responses."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

Asked = dict[str, Any]
Fault = Callable[["LyingServer", web.Request, Asked, bytes], Awaitable[web.StreamResponse | None]]
"""Takes the request, its JSON and the true response; returns another response, or None."""


class LyingServer:
    """Listens on a port of its own, in a thread, until `close`."""

    def __init__(self, port: int, fault: Fault) -> None:
        """`port`: of the real server on this machine."""
        self._worker = f"http://127.0.0.1:{port}"
        self._fault = fault
        self.num_open = 0
        """Requests that are being served."""
        self.num_generated = 0
        self.authorizations: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._respond)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as self._session:
            self._ready.set()
            await self._end.wait()
            await runner.cleanup()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self.authorizations.add(request.headers.get("authorization", ""))
        self.num_open += 1
        try:
            data = await request.read()
            asked = json.loads(data) if data else {}
            self.num_generated += "max_tokens" in asked
            url = f"{self._worker}{request.path_qs}"
            kept = {"content-type": "application/json"} if data else {}
            async with self._session.request(
                request.method, url, data=data or None, headers=kept
            ) as true:
                body = await true.read()
            if true.status == 200:
                spoilt = await self._fault(self, request, asked, body)
                if spoilt is not None:
                    return spoilt
            return web.Response(
                body=body, status=true.status, headers={"content-type": true.content_type}
            )
        finally:
            self.num_open -= 1


def events(data: bytes) -> list[Any]:
    """The JSON events of a stream."""
    lines = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def stream_of(found: list[Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in found) + end


async def send(
    request: web.Request, data: bytes, *, length: int | None = None
) -> web.StreamResponse:
    """Begin a response with this data, of `length` bytes in all."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    response.content_length = length
    await response.prepare(request)
    await response.write(data)
    return response
