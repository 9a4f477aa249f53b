"""Client of an engine process, which it restarts when it ends or hangs."""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from headrace.remote.watch import EngineWatch
from headrace.sampling.sampler import derive_seed

_WATCH_SECONDS = 0.25
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 3.0
_MAX_RESTARTS = 3
_RESTART_WINDOW = 600.0
_CHUNK_BYTES = 1 << 18
_MIN_SECONDS = 1e-3

log = logging.getLogger("headrace.server")


class EngineClient:
    has_sessions = True

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        adapters: Mapping[str, str],
        stall_seconds: float,
        started: StartedEngine | None = None,
    ) -> None:
        """`stall_seconds`: maximum duration of a step; `started`: a process to use first."""
        self.info: frames.EngineInfo | None = None
        self.report = frames.Report({}, {}, {})
        self.state: State = "loading"
        self.restarts = 0
        self.exit_code = 0
        self.adapters = dict(adapters)
        self.adapter_digests = dict[str, str]()
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
        self._restart_times: list[float] = []
        self._reason = ""
        self._supervisor: asyncio.Future[None] | None = None
        self._state_changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def step_seconds(self) -> float:
        return self._heartbeat.read().step if self._heartbeat else 0.0

    async def start(self) -> None:
        self._supervisor = asyncio.ensure_future(self._supervise())
        while self.state == "loading":
            await self._state_changed.wait()
            self._state_changed.clear()
        if self.state != "ready":
            raise EngineDeadError(self._reason)

    async def submit(self, request: frames.Add) -> Stream:
        started = time.monotonic()
        await self._quarantine.enter(request)
        request = _with_seconds_left(request, time.monotonic() - started)
        try:
            stream = self._open_stream(request)
        except NotReadyError:
            self._quarantine.leave(request)
            raise
        self._send(msgspec.structs.replace(request, id=stream.id))

        try:
            await stream.reply()
        except BaseException:
            stream.close()
            self._forget(stream.id)
            raise
        return stream

    def release(self, names: Iterable[str]) -> None:
        """Stop keeping the KV of paths, without waiting."""
        self._send(frames.Release("", list(names)))

    def release_all(self, prefix: str) -> None:
        """Stop keeping the KV of all paths whose names begin with `prefix`."""
        self._send(frames.Release("", [], prefix))

    async def load_adapter(self, name: str, path: str) -> None:
        reply = await self._run_command(
            lambda request_id: frames.LoadAdapter(request_id, name, path)
        )
        assert isinstance(reply, frames.Accepted)
        self.adapters[name], self.adapter_digests[name] = path, reply.digest

    async def unload_adapter(self, name: str) -> None:
        await self._run_command(lambda request_id: frames.UnloadAdapter(request_id, name))
        self.adapters.pop(name, None)
        self.adapter_digests.pop(name, None)

    async def block_map(self) -> frames.Blocks:
        blocks = await self._run_command(frames.MapBlocks)
        assert isinstance(blocks, frames.Blocks)
        return blocks

    async def close(self) -> None:
        self._set_state("closed")
        self._fail_all(NotReadyError("closed", "the server is shutting down"))
        if self._supervisor:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _run_command(self, make_command: Callable[[str], frames.Command]) -> frames.Reply:
        stream = self._open_stream()
        self._send(make_command(stream.id))
        try:
            return await stream.reply()
        finally:
            self._forget(stream.id)

    def _open_stream(self, request: frames.Add | None = None) -> Stream:
        if self.state not in ("ready", "stalled"):
            raise NotReadyError(self.state, self._reason)
        stream = Stream(str(next(self._ids)), request, self._abort, self._finish)
        self._streams[stream.id] = stream
        return stream

    def _abort(self, request_id: str) -> None:
        if self._forget(request_id):
            self._send(frames.Abort(request_id))

    def _finish(self, request_id: str) -> None:
        self._send(frames.Finish(request_id))

    def _forget(self, request_id: str) -> bool:
        stream = self._streams.pop(request_id, None)
        if stream and stream.request:
            self._quarantine.leave(stream.request)
        return stream is not None

    def _send(self, command: frames.Setup | frames.Command) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(frames.encode(command))

    def _set_state(self, state: State, reason: str = "") -> None:
        self.state, self._reason = state, reason
        self._state_changed.set()

    async def _supervise(self) -> None:
        while self.state != "closed":
            reason = await self._run_engine()
            self._quarantine.engine_ended(
                [stream.request for stream in self._streams.values() if stream.request]
            )
            self._fail_all(EngineDeadError(reason))
            if self.info is None or not self._may_restart():
                self._set_state("dead", reason)
                return
            log.error("the engine ended: %s; restarting it", reason)
            self.restarts += 1
            self._set_state("loading", reason)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        recent = [start for start in self._restart_times if now - start < _RESTART_WINDOW]
        self._restart_times = [*recent, now]
        return len(self._restart_times) <= _MAX_RESTARTS

    async def _run_engine(self) -> str:
        started, self._started = self._started or start_engine(), None
        self._process, heartbeat = started.process, started.heartbeat
        self._heartbeat = heartbeat
        try:
            reader, self._writer = await asyncio.open_connection(sock=started.connection)
            self._send(frames.Setup(self._model, self._seeded_config(), self.adapters))
            watch = asyncio.ensure_future(self._watch(heartbeat))
            try:
                return await self._read_events(reader)
            finally:
                watch.cancel()
        finally:
            await self._end_process()
            self._heartbeat = None
            heartbeat.close()

    def _seeded_config(self) -> EngineConfig:
        """Return the configuration with a base seed that no earlier engine had.

        Each engine counts its requests from 0, so an equal base seed would repeat all noise.
        """
        seed = self._config.seed
        if seed is None or not self.restarts:
            return self._config
        return replace(self._config, seed=derive_seed(seed, f"restart {self.restarts}"))

    async def _read_events(self, reader: asyncio.StreamReader) -> str:
        buffer = bytearray()
        while chunk := await _read_chunk(reader):
            buffer += chunk
            for body in frames.bodies(buffer):
                event = frames.read_event(body)
                match event:
                    case frames.Report():
                        self.report = event
                    case frames.Log(level, message):
                        log.log(level, message)
                    case frames.EngineInfo():
                        self.info, self.adapter_digests = event, dict(event.adapters)
                        self._set_state("ready")
                    case frames.Refused("", _, message):
                        self.exit_code = 1
                        self._reason = message
                    case _:
                        self._dispatch(event)

        code = await self._end_process()
        self.exit_code = code if code > 0 else 1
        return self._reason or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def _dispatch(
        self, event: frames.Reply | frames.Refused | frames.StepOutput | frames.Ended
    ) -> None:
        stream = self._streams.get(event.id)
        if stream is None or stream.put(event):
            return
        # The streams of an engine that closes stay open: `_supervise` quarantines their requests.
        engine_closes = (
            isinstance(event, frames.Ended) and event.error and event.error.kind == "closed"
        )
        if not engine_closes:
            self._streams.pop(event.id, None)
            if stream.request:
                self._quarantine.finished(stream.request)

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Set the state by the heartbeat, and kill an engine that stops or hangs."""
        process, watch = self._process, EngineWatch(self._stall_seconds)
        assert process
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            verdict = watch.judge(
                heartbeat.read(), cpu_ticks(process.pid), is_loading=self.state == "loading"
            )
            if verdict.state == "hangs":
                self._reason = f"no progress for {verdict.seconds:.0f} s"
                process.send_signal(signal.SIGUSR1)  # prints its stacks to stderr
                await asyncio.sleep(_WATCH_SECONDS)
                process.kill()
                return
            if verdict.state == "stalls" and self.state == "ready":
                log.error("the engine sent no heartbeat for %.1f s", verdict.seconds)
                self._set_state("stalled", "the engine does not respond")
            elif verdict.state == "works" and self.state == "stalled":
                self._set_state("ready")

    async def _end_process(self) -> int:
        if self._writer:
            self._writer.close()
            self._writer = None
        process = self._process
        if process is None:
            return 0
        deadline = time.monotonic() + _GRACE_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(_POLL_SECONDS)
        self._process = None
        return process.returncode

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(error)


def _with_seconds_left(request: frames.Add, waited: float) -> frames.Add:
    timeout = request.options.timeout
    if timeout is None:
        return request
    options = replace(request.options, timeout=max(_MIN_SECONDS, timeout - waited))
    return msgspec.structs.replace(request, options=options)


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_CHUNK_BYTES)
    except ConnectionError:  # an engine that ends with unread commands resets the connection
        return b""
