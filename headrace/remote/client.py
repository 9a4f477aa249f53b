"""The API process's side of the engine process: it starts it, sends it requests, hands out what
comes of them, and watches over it.

An engine that ends or hangs is started again, `_MOST_RESTARTS` times in `_RESTART_SECONDS` at most.
All requests that it had get an error at once, and none waits for ever.
"""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from headrace.config import EngineConfig
from headrace.remote import frames
from headrace.remote.engine import State
from headrace.remote.errors import EngineDeadError, EngineError, NotReadyError
from headrace.remote.heartbeat import Heartbeat, cpu_ticks
from headrace.remote.quarantine import Quarantine
from headrace.remote.start import StartedEngine, start_engine
from headrace.remote.stream import Stream

STALE = 2.0
"""Seconds without a pulse, and without having run, after which an engine is taken to be stopped."""
_STOPPED = 5.0
"""Seconds without a pulse after which it is started again, unless it has run meanwhile."""
_LOADED = 1800.0
"""Seconds that it may take to load the model."""
_WATCH = 0.25
_MOST_RESTARTS = 3
_RESTART_SECONDS = 600.0
_POLL = 0.01
_GRACE = 3.0
"""Seconds that an engine has to end by itself."""

log = logging.getLogger("headrace.server")


class EngineClient:
    """The engine process, whichever one runs: a `RemoteEngine`."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        adapters: Mapping[str, str],
        stall_seconds: float,
        started: StartedEngine | None = None,
    ) -> None:
        """`stall_seconds`: for how long a step may run before the engine is started again;
        `started`: the first process, if it is there.
        """
        self.info: frames.EngineInfo | None = None
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
        self._quarantine = Quarantine()
        self._started = started
        self._process: subprocess.Popen[bytes] | None = None
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
        """Start the engine, and return once it is ready. Raises EngineDeadError, with the reason,
        where it cannot be.
        """
        self._supervising = asyncio.ensure_future(self._supervise())
        while self.state == "loading":
            await self._changed.wait()
            self._changed.clear()
        if self.state != "ready":
            raise EngineDeadError(self._why)

    async def submit(self, request: frames.Add) -> Stream:
        """Send a request, and return the stream of what comes of it once the engine has taken it.

        Raises RefusedError where the engine cannot serve it, NotReadyError where there is no
        engine, EngineDeadError if it ends meanwhile.
        """
        await self._quarantine.enter(request)
        try:
            stream = self._open(request)
        except NotReadyError:
            self._quarantine.left(request)
            raise
        self._send(msgspec.structs.replace(request, id=stream.id))
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            self._forget(stream.id)
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
            self._forget(stream.id)

    def _open(self, asked: frames.Add | None = None) -> Stream:
        if self.state not in ("ready", "stalled"):
            raise NotReadyError(self.state, self._why)
        stream = Stream(str(next(self._ids)), asked, self._abort)
        self._streams[stream.id] = stream
        return stream

    def _abort(self, request_id: str) -> None:
        if self._forget(request_id):
            self._send(frames.Abort(request_id))

    def _forget(self, request_id: str) -> bool:
        """Let go of a stream before its end; whether it was there."""
        stream = self._streams.pop(request_id, None)
        if stream and stream.asked:
            self._quarantine.left(stream.asked)
        return stream is not None

    def _send(self, command: frames.Setup | frames.Command) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(frames.encode(command))

    def _become(self, state: State, why: str = "") -> None:
        self.state, self._why = state, why
        self._changed.set()

    async def _supervise(self) -> None:
        """Run one engine after the other."""
        while self.state != "closed":
            why = await self._run_one()
            self._quarantine.engine_ended(
                [stream.asked for stream in self._streams.values() if stream.asked]
            )
            self._fail_all(EngineDeadError(why))
            if self.info is None or not self._may_restart():
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
        started, self._started = self._started or start_engine(), None
        self._process, heartbeat = started.process, started.heartbeat
        self._heartbeat = heartbeat
        try:
            reader, self._writer = await asyncio.open_connection(sock=started.connection)
            self._send(frames.Setup(self._model, self._config, self.adapters))
            watch = asyncio.ensure_future(self._watch(heartbeat))
            try:
                return await self._read(reader)
            finally:
                watch.cancel()
        finally:
            await self._end_process()
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
                    case frames.EngineInfo():
                        self.info = event
                        self._become("ready")
                    case frames.Refused("", _, message):
                        self.exit_code = 1
                        self._why = message
                    case _:
                        self._hand_out(event)
        code = await self._end_process()
        self.exit_code = code if code > 0 else 1
        return self._why or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def _hand_out(
        self, event: frames.Answer | frames.Refused | frames.StepOutput | frames.Ended
    ) -> None:
        """An event of a request that is not there any more is dropped."""
        stream = self._streams.get(event.id)
        is_last = stream and not stream.put(event)
        engine_ends = (
            isinstance(event, frames.Ended) and event.error and event.error.kind == "closed"
        )
        if stream and is_last and not engine_ends:  # else it is one under which the engine ended
            self._streams.pop(event.id, None)
            if stream.asked:
                self._quarantine.ended_well(stream.asked)

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Watch the pulse, which begins once the model is loaded: without one the engine is not
        ready, and after a while it is ended.

        On a machine that is far too busy a process may have no pulse for seconds although it runs:
        then it is not ready a little later, and has as long as a step.
        """
        process, ticks = self._process, None
        assert process
        while True:
            await asyncio.sleep(_WATCH)
            pulse, is_loading = heartbeat.read(), self.state == "loading"
            if pulse.age <= STALE:
                ticks = cpu_ticks(process.pid)
            stalled, most = (
                max(pulse.age, pulse.step),
                _LOADED if is_loading else self._stall_seconds,
            )
            stands_still = pulse.age > STALE and cpu_ticks(process.pid) == ticks
            if stalled > most or (not is_loading and stands_still and pulse.age > _STOPPED):
                self._why = f"it stood still for {stalled:.0f} s"
                process.send_signal(signal.SIGUSR1)  # its stacks, on stderr
                await asyncio.sleep(_WATCH)
                process.kill()
                return
            if self.state == "loading":
                continue
            has_no_pulse = stands_still or pulse.age > _STOPPED
            if has_no_pulse and self.state == "ready":
                log.error("the engine has had no pulse for %.1f s", pulse.age)
                self._become("stalled", "the engine does not answer")
            elif not has_no_pulse and self.state == "stalled":
                self._become("ready")

    async def _end_process(self) -> int:
        """Close the socket, at which the engine ends, or else kill it; returns its exit code, which
        is below 0 for a signal.
        """
        if self._writer:
            self._writer.close()
            self._writer = None
        process = self._process
        if process is None:
            return 0
        deadline = time.monotonic() + _GRACE
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(_POLL)
        self._process = None
        return process.returncode

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(error)


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """What the engine has written; nothing once it has ended, be it with commands that it has not
    read, which reset the connection.
    """
    try:
        return await reader.read(1 << 18)
    except ConnectionError:
        return b""
