"""The worker processes, which rank 0 starts, watches and restarts.

If one worker is lost all are ended, so that no exchange waits for it.
"""

import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed import TCPStore

from headrace.batch import ints
from headrace.errors import RankLostError
from headrace.parallel.commands import Command, CommandKind, encode
from headrace.parallel.launch import INTERFACE_VARIABLE, Launcher, Process
from headrace.parallel.transport import GlooTransport
from headrace.parallel.worker import LENGTH, READY, STAGE_STEPS

_SILENT_SECONDS = 3.0
"""Seconds without reply and CPU time of a stopped worker."""
_TICK_SECONDS = 0.25
_LOAD_SECONDS = 1800.0
_GRACE_SECONDS = 3.0
_MAX_RESTARTS = 3
_RESTART_WINDOW = 600.0
_CHUNK_BYTES = 1 << 16

log = logging.getLogger("headrace.parallel")


@dataclass
class _Worker:
    rank: int
    process: Process
    is_ready: bool = False
    last_active: float = field(default_factory=time.monotonic)
    has_replied: bool = False
    stage_steps: NDArray[np.float64] | None = None
    ticks: int | None = None
    buffer: bytearray = field(default_factory=bytearray)


class Workers:
    def __init__(
        self,
        launcher: Launcher,
        setups: Sequence[Mapping[str, Any]],
        transport: GlooTransport,
        identity: str,
    ) -> None:
        """`setups`: first message to each worker; `identity`: the `rank.identity` that all must
        have.
        """
        self._launcher, self._setups = launcher, setups
        self._transport, self._identity = transport, identity
        self._kept_commands: list[bytes] = []
        self._changed = Condition()
        self._loss = ""
        self._is_loss_raised = False
        self.generation = 0
        self._restart_times: list[float] = []
        self._store: TCPStore | None = None
        self._workers: list[_Worker] = []
        self._start_all()

    @contextmanager
    def working(self, generation: int | None = None) -> Iterator[None]:
        """Run a step with all ranks.

        Raises RankLostError if a rank is lost, or was lost without notice. The next use
        restarts the ranks, except for an earlier `generation`.
        """
        is_old = generation not in (None, self.generation)
        if is_old or (self._loss and (not self._is_loss_raised or generation is not None)):
            self._is_loss_raised = True
            raise RankLostError(self._loss or "the rank that ran this step was lost")
        if self._loss:
            self._restart()
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, RankLostError)
            self._lose(str(error) if is_lost else f"{type(error).__name__}: {error}")
            self._is_loss_raised = True
            if isinstance(error, RankLostError | OSError):
                raise RankLostError(self._loss) from None
            raise

    def connect(self) -> None:
        """Wait until all ranks are connected. Raises RankLostError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss or all(worker.is_ready for worker in self._workers),
                _LOAD_SECONDS,
            )
            if self._loss:
                raise RankLostError(self._loss)
        host = self._launcher.host
        # Listen on this host's address: the store itself would listen on all interfaces.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.send(Command(CommandKind.JOIN, 0, [ints([port])]))
        with _gloo_interface(self._launcher.interface):
            self._transport.connect(self._open_groups(self._store))
        for command in self._kept_commands:
            self._send_bytes(command)

    def _open_groups(self, store: TCPStore) -> tuple[Any, Any]:
        """Open the process groups in a thread: torch would wait minutes for a lost rank."""
        groups: Future[tuple[Any, Any]] = Future()

        def open_groups() -> None:
            try:
                groups.set_result(self._transport.open_groups(store))
            except Exception as error:
                groups.set_exception(error)

        Thread(target=open_groups, daemon=True).start()
        while not groups.done() and not self._loss:
            wait([groups], _TICK_SECONDS)
        if not groups.done():
            raise RankLostError(self._loss)
        return groups.result()

    def send(self, command: Command) -> None:
        self._send_bytes(encode(command))

    def send_and_keep(self, command: Command) -> None:
        self._kept_commands.append(encode(command))
        if not self._loss:
            with self.working():
                self._send_bytes(self._kept_commands[-1])

    def stage_steps(self) -> dict[int, NDArray[np.float64]]:
        """Return each worker's last step times, [steps, (begin, end)], in seconds of its clock."""
        for worker in self._workers:
            worker.stage_steps = None
        self.send(Command(CommandKind.STAGE_STEPS))
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._loss or all(worker.stage_steps is not None for worker in self._workers)
                )
            )
            if self._loss:
                raise RankLostError(self._loss)
        return {
            worker.rank: worker.stage_steps
            for worker in self._workers
            if worker.stage_steps is not None
        }

    def close(self) -> None:
        with suppress(OSError):
            if not self._loss:
                self.send(Command(CommandKind.CLOSE))
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            worker.process.end_reason(max(0.0, deadline - time.monotonic()))
        self._lose("closed")
        self._launcher.close()
        self._transport.disconnect()

    def _start_all(self) -> None:
        started = Event()
        self._watcher = Thread(target=self._start_and_watch, args=(started,), daemon=True)
        self._watcher.start()
        started.wait()

    def _start_and_watch(self, started: Event) -> None:
        self._workers = []
        try:
            for setup in self._setups:
                self._workers.append(self._start(setup))
        except OSError as error:
            self._lose(f"a worker could not start: {error}")
        finally:
            started.set()
        self._watch(self._workers)

    def _start(self, setup: Mapping[str, Any]) -> _Worker:
        process, body = self._launcher.start(setup["rank"]), json.dumps(setup).encode()
        process.connection.sendall(LENGTH.pack(len(body)) + body)
        return _Worker(setup["rank"], process)

    def _restart(self) -> None:
        now = time.monotonic()
        recent = [start for start in self._restart_times if now - start < _RESTART_WINDOW]
        self._restart_times = [*recent, now]
        if len(self._restart_times) > _MAX_RESTARTS:
            raise RankLostError(
                f"{self._loss}; the ranks have restarted {_MAX_RESTARTS} times in "
                f"{_RESTART_WINDOW / 60:.0f} minutes"
            )
        log.error("%s; restarting the ranks", self._loss)
        self._transport.disconnect()
        # The watcher would take the end of old workers for the end of new ones.
        self._watcher.join()
        self._loss, self._is_loss_raised = "", False
        self.generation += 1
        self._start_all()
        try:
            self.connect()
        except (RankLostError, OSError) as error:
            self._lose(str(error))
            self._is_loss_raised = True
            raise RankLostError(self._loss) from None

    def _send_bytes(self, data: bytes) -> None:
        for worker in self._workers:
            worker.process.connection.sendall(data)

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._loss = self._loss or reason
            for worker in self._workers:
                worker.process.kill()
            self._changed.notify_all()

    def _watch(self, workers: list[_Worker]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.process.connection, selectors.EVENT_READ, worker)
            while not self._loss:
                for key, _ in selector.select(_TICK_SECONDS):
                    if reason := self._read_replies(key.data):
                        self._lose(reason)
                for worker in workers:
                    if _is_stopped(worker):
                        self._lose(
                            f"rank {worker.rank} made no progress for {_SILENT_SECONDS:.0f} s"
                        )
        for worker in workers:
            worker.process.connection.close()

    def _read_replies(self, worker: _Worker) -> str:
        try:
            chunk = worker.process.connection.recv(_CHUNK_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            reason = worker.process.end_reason(_GRACE_SECONDS) or "closed its connection"
            return f"rank {worker.rank} {reason}"
        worker.last_active, worker.has_replied = time.monotonic(), True
        worker.buffer += chunk
        while len(worker.buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(worker.buffer)[0]
            if len(worker.buffer) < end:
                break
            reply = bytes(worker.buffer[LENGTH.size : end])
            del worker.buffer[:end]
            if reason := self._handle_reply(worker, reply):
                return reason
        return ""

    def _handle_reply(self, worker: _Worker, reply: bytes) -> str:
        if reply.startswith(READY):
            identity = reply[len(READY) :].decode()
            if identity != self._identity:
                return (
                    f"rank {worker.rank} differs from rank 0, so results could differ: "
                    f"{identity}, and {self._identity}"
                )
            with self._changed:
                worker.is_ready = True
                self._changed.notify_all()
        elif reply.startswith(STAGE_STEPS):
            with self._changed:
                worker.stage_steps = np.frombuffer(reply[len(STAGE_STEPS) :]).reshape(-1, 2)
                self._changed.notify_all()
        elif reply:
            return f"rank {worker.rank}: {reply.decode(errors='replace')}"
        return ""


def _is_stopped(worker: _Worker) -> bool:
    if not worker.has_replied and worker.process.cpu_ticks() is None:
        return False
    if time.monotonic() - worker.last_active > _SILENT_SECONDS:
        ticks = worker.process.cpu_ticks()
        if ticks != worker.ticks:
            worker.last_active, worker.ticks = time.monotonic() - _SILENT_SECONDS / 2, ticks
    return time.monotonic() - worker.last_active > _SILENT_SECONDS


@contextmanager
def _gloo_interface(interface: str) -> Iterator[None]:
    before = os.environ.get(INTERFACE_VARIABLE)
    if interface:
        os.environ[INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE_VARIABLE, None)
        if before is not None:
            os.environ[INTERFACE_VARIABLE] = before
