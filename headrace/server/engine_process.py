"""The engine process: reads commands from its socket, runs the engine in a thread of its own, and writes what comes of it.

`headrace.server.engine_start` starts it, with a socket and a page for its pulse, which it inherits. It ends when its parent closes the
socket, or ends; signals of a terminal are for the parent.

The main thread reads frames and checks what they ask for, so a step never waits for that. The thread of the engine (`engine/thread.py`)
puts what is new in a queue, and a third thread encodes and writes it (`outbox.py`): a reader that is slow holds up no step.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Thread
from typing import Any

import numpy as np

from headrace.assembly.load import load_engine, open_model
from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.source import resolve
from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread
from headrace.errors import ClosedError, HeadraceError, NonFiniteLogitsError, RequestError
from headrace.model.spec import ModelSpec
from headrace.request import RequestOutput, Update
from headrace.server import frames
from headrace.server.heartbeat import Heartbeat
from headrace.server.outbox import Outbox
from headrace.stats import BlockMap, Holding, Stats

_BEAT = 0.1
"""Seconds between two looks at the step."""
_REPORT = 0.25
"""Seconds between two reports, while something happens."""
_CHUNK = 1 << 18
_PR_SET_PDEATHSIG = 1


class _Sink:
    """Receives the updates of one request."""

    def __init__(self, request_id: str, outbox: Outbox) -> None:
        self._id = request_id
        self._outbox = outbox

    def put(self, item: Update | BaseException, /) -> None:
        """Queue what is new for the writer."""
        try:
            if not isinstance(item, BaseException):
                self._put(item)
                return
        except Exception as error:
            item = error
        self._outbox.put(frames.Ended(self._id, 0, 0, 0, 0, 0, refused(self._id, item), None, None))

    def _put(self, item: Update) -> None:
        if item.token_ids or item.text or item.finish_reason:
            news = (item.text, item.token_ids, item.logprobs, item.finish_reason, item.stop_reason)
            self._outbox.put(frames.News(self._id, item.index, *news))
        if item.result:
            self._outbox.put(ended(self._id, item.result))


class EngineServer:
    """Serves one engine to the socket of the API process."""

    def __init__(self, engine: Engine, spec: ModelSpec, connection: socket.socket, incoming: Iterable[bytes], heartbeat: Heartbeat) -> None:
        self._engine = engine
        self._spec = spec
        self._connection = connection
        self._incoming = incoming
        self._heartbeat = heartbeat
        self._thread = EngineThread(engine)
        self._outbox = Outbox()
        self._stirred, self._over = Flag(), Flag()
        self._stirred.set()

    def serve(self) -> None:
        """Serve until the API process closes the socket."""
        threads = [Thread(target=work, daemon=True) for work in (self._write, self._beat, self._report)]
        for thread in threads:
            thread.start()
        try:
            for body in self._incoming:
                self._obey(frames.read_command(body))
        finally:
            self._over.set()
            self._outbox.close()
            self._stirred.set()
            self._thread.close()

    def _obey(self, command: frames.Command) -> None:
        try:
            match command:
                case frames.Abort(request_id):
                    self._thread.abort([request_id])
                    return
                case frames.Add():
                    self._add(command)
                    return
                case frames.LoadAdapter(_, name, path):
                    adapter = read_adapter(resolve(path), self._spec)
                    self._thread.call(lambda: self._engine.load_adapter(name, adapter))
                case frames.MapBlocks(request_id):
                    self._outbox.put(blocks_of(request_id, self._thread.call(self._engine.block_map)))
                    return
                case frames.UnloadAdapter(_, name):
                    self._thread.call(lambda: self._engine.unload_adapter(name))
            self._outbox.put(frames.Accepted(command.id))
        except Exception as error:
            self._outbox.put(refused(command.id, error))

    def _add(self, command: frames.Add) -> None:
        terms: dict[str, Any] = {
            "priority": command.priority,
            "timeout": command.timeout,
            "cache_salt": command.cache_salt,
            "adapter": command.adapter,
        }
        terms |= {"pooling": command.pooling, "output_token_ids": command.output_token_ids}
        request = self._engine.check(command.prompt_token_ids, command.params, **terms)
        self._outbox.put(frames.Accepted(command.id))
        self._thread.add([request], [command.id], _Sink(command.id, self._outbox))

    def _write(self) -> None:
        """Write what the outbox has, as it comes."""
        with suppress(OSError):  # the API process has gone: the reader sees it, too
            while self._outbox.write_next(self._connection):
                self._stirred.set()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            if self._thread.closed:  # by an error of its own: without an engine this process ends, and another is started
                self._connection.shutdown(socket.SHUT_RD)
                return
            self._heartbeat.beat(self._thread.step_begun)

    def _report(self) -> None:
        """Say what the engine does, while that changes."""
        report = None
        with suppress(ClosedError):
            while not self._over.wait(_REPORT):
                self._stirred.wait()
                self._stirred.clear()
                last, report = report, report_of(self._thread.call(self._engine.stats))
                if report != last:
                    self._outbox.put(report)  # which stirs: there is another look until nothing changes


def refused(request_id: str, error: BaseException) -> frames.Refused:
    """An error as it crosses the socket: its kind, and a message that is of use to the client."""
    match error:
        case RequestError():
            return frames.Refused(request_id, "request", str(error))
        case NonFiniteLogitsError():
            return frames.Refused(request_id, "not_finite", str(error))
        case ClosedError():
            return frames.Refused(request_id, "closed", str(error))
        case HeadraceError():
            return frames.Refused(request_id, "request", str(error))
    return frames.Refused(request_id, "internal", f"{type(error).__name__}: {error}")


def ended(request_id: str, result: RequestOutput) -> frames.Ended:
    """The end of a request, without what its news have said."""
    timing = result.timing
    return frames.Ended(
        request_id,
        len(result.prompt_token_ids),
        result.cached_tokens,
        *(timing.queue, timing.prefill, timing.decode),
        refused(request_id, result.error) if result.error else None,
        result.prompt_logprobs,
        None if result.embedding is None else result.embedding.astype("<f4").tobytes(),
    )


def report_of(stats: Stats) -> frames.Report:
    """The statistics as they cross the socket."""
    figures = {name: float(value) for name, value in stats._asdict().items() if isinstance(value, int | float)}
    for name in ("blocks_total", "blocks_free", "blocks_cached", "kv_bytes", "kv_bytes_used", "occupancy", "waste"):
        figures[name] = float(getattr(stats, name))
    drafts = {name: [float(one.steps), float(one.proposed), float(one.accepted)] for name, one in stats.drafts.items()}
    return frames.Report(figures, dict(stats.adapters), drafts)


def blocks_of(request_id: str, blocks: BlockMap) -> frames.Blocks:
    """The map of the blocks as it crosses the socket: a full pool of one long sequence is then a few numbers."""
    groups = [
        frames.GroupBlocks(g.layers, g.window, g.num_blocks, [_holding(one) for one in g.holdings], _runs(sorted(g.cached)))
        for g in blocks.groups
    ]
    return frames.Blocks(request_id, blocks.block_size, groups)


def _holding(held: Holding) -> frames.Holding:
    present = [block for block in held.blocks if block >= 0]
    return frames.Holding(held.request, held.seq, held.computed, len(held.blocks) - len(present), _runs(present))


def _runs(blocks: Sequence[int]) -> list[int]:
    """Blocks as runs of neighbours: the first and the number of each."""
    if not blocks:
        return []
    ids = np.asarray(blocks)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ids))
    return [int(n) for pair in zip(ids[starts], lengths, strict=True) for n in pair]


def hello(engine: Engine, spec: ModelSpec) -> frames.Hello:
    """What the API process is told once the engine is ready."""
    limits, config, stats = engine.limits, engine.config, engine.stats()
    return frames.Hello(
        architecture=spec.architecture,
        vocab_size=limits.vocab_size,
        dim=spec.dim,
        max_model_len=limits.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=max(limits.kv.num_blocks) * limits.kv.block_size,
        kv_bytes=stats.kv_bytes,
        weight_bytes=engine.weight_bytes,
        kv_dtype=limits.kv.dtype,
        threads=config.threads,
        backend=config.backend,
        lossy=config.lossy,
        activations=config.activations,
        block_size=limits.kv.block_size,
    )


def _bodies(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of the frames that come, up to the end of the connection."""
    buffer = bytearray()
    while True:
        try:
            chunk = connection.recv(_CHUNK)
        except ConnectionResetError:
            return
        if not chunk:
            return
        buffer += chunk
        yield from frames.bodies(buffer)


def main(*arguments: str) -> None:
    """Make the engine that the first frame asks for, and serve it. An error of the model or of its options is the only frame then, and the
    exit code is its own.

    `arguments`: the descriptors of the socket and of the heartbeat, and the id of the API process.
    """
    socket_fd, heartbeat_fd, parent = map(int, arguments)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the API process asks for the stacks of an engine that hangs
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone meanwhile
        return
    connection, heartbeat = socket.socket(fileno=socket_fd), Heartbeat(heartbeat_fd)
    incoming = _bodies(connection)
    setup = next(map(frames.read_setup, incoming), None)
    if setup is None:  # the API process has given it up
        return
    try:
        checkpoint = open_model(setup.model, setup.config)
        engine = load_engine(setup.model, setup.config, checkpoint, checkpoint.load_tokenizer())
        spec = checkpoint.spec
        for name, path in setup.adapters.items():
            engine.load_adapter(name, read_adapter(resolve(path), spec))
        del checkpoint  # it keeps the file open
    except HeadraceError as error:
        with suppress(OSError):  # the API process has met the same error
            connection.sendall(frames.encode(frames.Refused("", "request", str(error))))
        sys.exit(error.exit_code)
    gc.freeze()
    with suppress(BrokenPipeError):  # the API process has gone
        connection.sendall(frames.encode(hello(engine, spec)))
        EngineServer(engine, spec, connection, incoming, heartbeat).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
