"""The API process's side of the engine process: it starts it, sends it requests, hands out what comes of them, and watches over it.

An engine that ends or hangs is started again, `_MOST_RESTARTS` times in `_RESTART_SECONDS` at most. All requests that it had get an error
at once, and none waits for ever.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count
from typing import Literal

from headrace.config import EngineConfig
from headrace.request import PoolingParams, SamplingParams
from headrace.server import frames
from headrace.server.engine_process import Setup
from headrace.server.errors import EngineDeadError, EngineError, NotReadyError, RefusedError, TooSlowError
from headrace.server.heartbeat import Heartbeat

State = Literal["loading", "ready", "stalled", "dead", "closed"]

STALE = 2.0
"""Seconds without a pulse after which an engine is taken to be stopped."""
_STOPPED = 5.0
"""Seconds without a pulse after which it is started again."""
_WATCH = 0.25
_MOST_RESTARTS = 3
_RESTART_SECONDS = 600.0
_MOST_UNREAD = 4096
"""Events of one stream that its reader may leave unread: a reader slower than that loses its request."""
_GRACE = 3.0
"""Seconds that an engine has to end by itself."""

log = logging.getLogger("headrace.server")


class Stream:
    """What comes of one request. `close` ends the request, unless it has ended."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.id = request_id
        self._abort = abort
        self._events: asyncio.Queue[frames.Event | EngineError] = asyncio.Queue()
        self._over = False

    def put(self, event: frames.Event | EngineError) -> bool:
        """Hand over an event; whether there may be more."""
        if self._events.qsize() >= _MOST_UNREAD and not isinstance(event, frames.Ended | EngineError):
            self._abort(self.id)
            event = TooSlowError("the client reads slower than its answer is written")
        self._over = isinstance(event, frames.Ended | EngineError)
        self._events.put_nowait(event)
        return not self._over

    async def accepted(self) -> frames.Answer:
        """Wait until the engine has done what was asked. Raises RefusedError where it cannot, or what has ended the engine."""
        event = await self._events.get()
        if isinstance(event, frames.Refused):
            self._over = True
            raise RefusedError(event.kind, event.message)
        if isinstance(event, EngineError):
            raise event
        assert isinstance(event, frames.Answer), "nothing else comes first"
        return event

    async def __aiter__(self) -> AsyncIterator[frames.News | frames.Ended]:
        """The news of the request, and how it ended, which comes last. Raises what has ended the engine."""
        while True:
            event = await self._events.get()
            if isinstance(event, EngineError):
                raise event
            if isinstance(event, frames.News):
                yield event
            elif isinstance(event, frames.Ended):
                yield event
                return

    def close(self) -> None:
        """End the request, unless it has ended."""
        if not self._over:
            self._over = True
            self._abort(self.id)


class EngineClient:
    """The engine process, whichever one runs."""

    def __init__(self, model: str, config: EngineConfig, adapters: Mapping[str, str], stall_seconds: float) -> None:
        """`stall_seconds`: for how long a step may run before the engine is started again."""
        self.hello: frames.Hello | None = None
        self.report = frames.Report({}, {}, {})
        self.state: State = "loading"
        self.restarts = 0
        self.adapters = dict(adapters)
        """Paths of the adapters that requests may name, by name."""
        self._model = model
        self._config = config
        self._stall_seconds = stall_seconds
        self._streams: dict[str, Stream] = {}
        self._ids = count()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heartbeat: Heartbeat | None = None
        self._restarted: list[float] = []
        self._why = ""
        self._supervising: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self.exit_code = 0

    @property
    def ready(self) -> bool:
        """Whether requests are taken, and the engine has a pulse."""
        return self.state == "ready"

    @property
    def step_seconds(self) -> float:
        """For how long the present step has run."""
        return self._heartbeat.read().step if self._heartbeat else 0.0

    async def start(self) -> None:
        """Start the engine, and return once it is ready. Raises EngineDeadError, with the reason, where it cannot be."""
        self._supervising = asyncio.ensure_future(self._supervise())
        while self.state == "loading":
            await self._changed.wait()
            self._changed.clear()
        if self.state != "ready":
            raise EngineDeadError(self._why)

    async def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        pooling: PoolingParams | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Stream:
        """Send a request, and return the stream of what comes of it once the engine has taken it.

        Raises RefusedError where the engine cannot serve it, NotReadyError where there is no engine, EngineDeadError if it ends meanwhile.
        """
        stream = self._open()
        terms = (params, pooling, priority, timeout, cache_salt, adapter)
        self._send(frames.Add(stream.id, prompt_token_ids, *terms))
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            self._streams.pop(stream.id, None)
            raise
        return stream

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter for requests that name it. Raises as `submit` does."""
        await self._ask(lambda request_id: frames.LoadAdapter(request_id, name, path))
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests under way keep it. Raises as `submit` does."""
        await self._ask(lambda request_id: frames.UnloadAdapter(request_id, name))
        self.adapters.pop(name, None)

    async def block_map(self) -> frames.Blocks:
        """Which request holds which blocks, as it is between two steps. Raises as `submit` does."""
        answer = await self._ask(frames.MapBlocks)
        assert isinstance(answer, frames.Blocks)
        return answer

    async def close(self) -> None:
        """End the engine, and all requests with it."""
        self._become("closed")
        self._fail_all(NotReadyError("closed", "the server is shutting down"))
        if self._supervising:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)

    async def _ask(self, command: Callable[[str], frames.Command]) -> frames.Answer:
        """What comes of a command that is made of its id."""
        stream = self._open()
        self._send(command(stream.id))
        try:
            return await stream.accepted()
        finally:
            self._streams.pop(stream.id, None)

    def _open(self) -> Stream:
        if self.state not in ("ready", "stalled"):
            raise NotReadyError(self.state, self._why)
        stream = Stream(str(next(self._ids)), self._abort)
        self._streams[stream.id] = stream
        return stream

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None):
            self._send(frames.Abort(request_id))

    def _send(self, command: frames.Command) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(frames.encode(command))

    def _become(self, state: State, why: str = "") -> None:
        self.state, self._why = state, why
        self._changed.set()

    async def _supervise(self) -> None:
        """Run one engine after the other."""
        while self.state != "closed":
            why = await self._run_one()
            self._fail_all(EngineDeadError(why))
            if self.hello is None or not self._may_restart():
                self._become("dead", why)
                return
            log.error("the engine ended: %s; it is started again", why)
            self.restarts += 1
            self._become("loading", why)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarted = [*(at for at in self._restarted if now - at < _RESTART_SECONDS), now]
        return len(self._restarted) <= _MOST_RESTARTS

    async def _run_one(self) -> str:
        """Start an engine and serve it to its end; returns why it ended."""
        ours, theirs = socket.socketpair()
        heartbeat = self._heartbeat = Heartbeat.create()
        setup = Setup(self._model, self._config, self.adapters, theirs.fileno(), heartbeat.fd, os.getpid())
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.server.engine_process", frames.as_json(setup)),
                pass_fds=(theirs.fileno(), heartbeat.fd),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the API process
            )
            theirs.close()
            reader, self._writer = await asyncio.open_connection(sock=ours)
            watch = asyncio.ensure_future(self._watch(heartbeat))
            try:
                return await self._read(reader)
            finally:
                watch.cancel()
        finally:
            await self._end_process(_GRACE)
            self._heartbeat = None
            heartbeat.close()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Hand out events until the engine ends; returns why."""
        buffer = bytearray()
        while chunk := await _chunk(reader):
            buffer += chunk
            for body in frames.bodies(buffer):
                event = frames.read_event(body)
                match event:
                    case frames.Report():
                        self.report = event
                    case frames.Hello():
                        self.hello = event
                        self._become("ready")
                    case frames.Refused("", _, message):
                        self.exit_code = 1
                        self._why = message
                    case _:
                        self._hand_out(event)
        assert self._process is not None
        code = await self._process.wait()
        self.exit_code = code if code > 0 else 1
        return self._why or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def _hand_out(self, event: frames.Answer | frames.Refused | frames.News | frames.Ended) -> None:
        """An event of a request that is not there any more is dropped."""
        stream = self._streams.get(event.id)
        if stream and not stream.put(event):
            self._streams.pop(event.id, None)

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Watch the pulse: without one the engine is not ready, and after a while it is ended."""
        while True:
            await asyncio.sleep(_WATCH)
            pulse = heartbeat.read()
            if self.state == "loading":
                continue
            stalled = max(pulse.age, pulse.step)
            if pulse.age > _STOPPED or pulse.step > self._stall_seconds:
                self._why = f"it stood still for {stalled:.0f} s"
                await self._kill()
                return
            if pulse.age > STALE and self.state == "ready":
                log.error("the engine has had no pulse for %.1f s", pulse.age)
                self._become("stalled", "the engine does not answer")
            elif pulse.age <= STALE and self.state == "stalled":
                self._become("ready")

    async def _kill(self) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)  # its stacks, on stderr
                await asyncio.sleep(_WATCH)
                self._process.send_signal(signal.SIGKILL)

    async def _end_process(self, grace: float) -> None:
        """Close the socket, at which the engine ends; or else kill it."""
        if self._writer:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        if process and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), grace)
            except TimeoutError:
                process.kill()
                await process.wait()

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(error)


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """What the engine has written; nothing once it has ended, be it with commands that it has not read, which reset the connection."""
    try:
        return await reader.read(1 << 18)
    except ConnectionError:
        return b""
