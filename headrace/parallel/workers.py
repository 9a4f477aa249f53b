"""The worker processes, which rank 0 starts, watches and restarts.

If one worker is lost all are ended, so that no exchange waits for it. If a step fails on a rank
that lives, all ranks leave their process groups, and join new ones before the next step.
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
from math import inf
from threading import Condition, Event, Thread
from typing import Any

from torch.distributed import TCPStore

from headrace.batch import ints
from headrace.errors import RankFailedError, RankLostError
from headrace.parallel.commands import Array, Command, CommandKind, encode
from headrace.parallel.launch import INTERFACE_VARIABLE, Launcher
from headrace.parallel.process_groups import ProcessGroups
from headrace.parallel.watched_worker import SILENT_SECONDS, WatchedWorker
from headrace.parallel.worker import ANSWER, FAILED, GENERATION, LENGTH, READY

_TICK_SECONDS = 0.25
_LOAD_SECONDS = 1800.0
_ANSWER_SECONDS = 300.0
_GRACE_SECONDS = 3.0
_MAX_RESTARTS = 3
_RESTART_WINDOW = 600.0

log = logging.getLogger("headrace.parallel")


class Workers:
    def __init__(
        self,
        launcher: Launcher,
        setups: Sequence[Mapping[str, Any]],
        transport: ProcessGroups,
        identity: str,
    ) -> None:
        """`setups`: first message to each worker; `identity`: the `rank.identity` that all must
        have.
        """
        self._launcher, self._setups = launcher, setups
        self._transport, self._identity = transport, identity
        self._adapters: dict[int, bytes] = {}
        """Commands that add the loaded adapters, by number; a restart repeats them."""
        self._make_blocks: bytes | None = None
        """Command that makes host blocks, repeated as well."""
        self._changed = Condition()
        self._loss = ""
        """Why the workers have ended."""
        self._failure = ""
        """The error of a worker that lives, in a step of this generation."""
        self._is_joined = False
        self._is_reported = False
        """Whether the caller knows of the loss or failure, and so of incomplete KV."""
        self.generation = 0
        """The number of process groups that ended; a step belongs to one generation."""
        self._restart_times: list[float] = []
        self._working_since = inf
        """Time at which this rank began to launch a step, or to wait for one."""
        self._store: TCPStore | None = None
        self._workers: list[WatchedWorker] = []
        self._start_all()

    @property
    def adapter_bytes(self) -> int:
        """Bytes that rank 0 keeps to add the loaded adapters again after a restart."""
        return sum(map(len, self._adapters.values()))

    @contextmanager
    def working(self, generation: int | None = None) -> Iterator[None]:
        """Run a step with all ranks, or wait for the results of a step of `generation`.

        The first use after a loss or failure raises it, because KV is incomplete. The next use
        restarts the ranks, or joins them in new groups.

        Raises RankLostError if a rank is lost, RankFailedError if a step failed on another rank,
        and this rank's own errors.
        """
        if generation not in (None, self.generation):
            raise RankLostError(self._loss or self._failure or "an earlier step has failed")
        if (self._loss or self._failure) and not self._is_reported:
            raise self._leave_groups(None)
        if self._loss:
            self._restart()
        elif not self._is_joined:
            self._join()
        try:
            self._working_since = time.monotonic()
            yield
        except Exception as error:
            raise self._leave_groups(error) from None
        finally:
            self._working_since = inf

    def check(self) -> None:
        """Raise RankLostError if a rank is lost, or its step has failed."""
        if self._loss or self._failure:
            raise RankLostError(self._loss or self._failure)

    def connect(self) -> None:
        """Wait until all ranks are connected. Raises RankLostError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss or all(worker.is_ready for worker in self._workers),
                _LOAD_SECONDS,
            )
            if self._loss:
                raise RankLostError(self._loss)
        self._join()
        self._repeat_adapters()
        if self._make_blocks:
            self._add(self._make_blocks)

    def send(self, command: Command) -> None:
        self._send_bytes(encode(command))

    def add_adapter(self, number: int, arrays: Sequence[Array | None]) -> None:
        """Add an adapter on all workers. Raises RankFailedError if one cannot hold it.

        After a loss, the restart adds it.
        """
        command = encode(Command(CommandKind.ADD_ADAPTER, number, arrays))
        self._adapters[number] = command
        try:
            self._add(command)
        except RankFailedError:
            self.remove_adapter(number)
            raise
        except (RankLostError, OSError) as error:
            log.warning("an adapter will be added after the restart of the ranks: %s", error)

    def make_host_blocks(self, counts: Sequence[int]) -> None:
        """Make host blocks on all workers. Raises RankFailedError if one has no memory."""
        self._make_blocks = encode(Command(CommandKind.MAKE_HOST_BLOCKS, 0, [ints(list(counts))]))
        self._add(self._make_blocks)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter. After a loss, the restart does not add it."""
        del self._adapters[number]
        with suppress(OSError):
            self.send(Command(CommandKind.REMOVE_ADAPTER, number))

    def ask(self, command: Command) -> dict[int, bytes]:
        """Return the answer of each rank. Raises RankLostError."""
        return self._ask(encode(command))

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

    # Groups

    def _join(self) -> None:
        """Join all ranks in new process groups. Raises RankLostError."""
        self._failure, self._is_reported = "", False
        try:
            # Listen on this host's address: the store itself would listen on all interfaces.
            listener = socket.create_server((self._launcher.host, 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self._launcher.host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self.send(Command(CommandKind.JOIN, self.generation, [ints([port])]))
            with _gloo_interface(self._launcher.interface):
                self._transport.connect(self._open_groups(self._store))
        except (RankLostError, OSError) as error:
            self._lose(str(error))
            raise self._leave_groups(None) from None
        self._is_joined = True

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

    def _leave_groups(self, error: Exception | None) -> Exception:
        """End all exchanges after an error of this rank, or None, and return the error to raise."""
        if error is None or isinstance(error, RankLostError | OSError):
            # A worker that lives gives a reason, and the watcher finds the end of another.
            with self._changed:
                self._changed.wait_for(lambda: self._loss or self._failure, _GRACE_SECONDS)
            if not self._failure:
                self._lose(str(error))
            error = RankLostError(self._loss) if self._loss else RankFailedError(self._failure)
        self._transport.disconnect()
        self._is_joined, self._is_reported = False, True
        self.generation += 1
        return error

    # Commands

    def _add(self, command: bytes) -> None:
        for rank, error in self._ask(command).items():
            if error:
                raise RankFailedError(f"rank {rank}: {error.decode(errors='replace')}")

    def _repeat_adapters(self) -> None:
        """Add the loaded adapters to new workers, with the numbers that they have here."""
        numbers = range(max(self._adapters, default=-1) + 1)
        for number in numbers:
            empty = Command(CommandKind.ADD_ADAPTER, number)
            try:
                self._add(self._adapters.get(number) or encode(empty))
            except RankFailedError as error:
                raise RankLostError(f"an adapter could not be added again: {error}") from None
        for number in numbers:
            if number not in self._adapters:
                self.send(Command(CommandKind.REMOVE_ADAPTER, number))

    def _ask(self, command: bytes) -> dict[int, bytes]:
        for worker in self._workers:
            worker.answer = None
        self._send_bytes(command)
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss or all(worker.answer is not None for worker in self._workers),
                _ANSWER_SECONDS,
            )
        answers = {worker.rank: worker.answer for worker in self._workers}
        for rank, answer in answers.items():
            if answer is None:
                self._lose(f"rank {rank} did not answer for {_ANSWER_SECONDS:.0f} s")
        if self._loss:
            raise RankLostError(self._loss)
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _send_bytes(self, data: bytes) -> None:
        for worker in self._workers:
            worker.process.connection.sendall(data)

    # Processes

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

    def _start(self, setup: Mapping[str, Any]) -> WatchedWorker:
        process, body = self._launcher.start(setup["rank"]), json.dumps(setup).encode()
        process.connection.sendall(LENGTH.pack(len(body)) + body)
        return WatchedWorker(setup["rank"], process)

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
        # The watcher would take the end of old workers for the end of new ones.
        self._watcher.join()
        self._loss = self._failure = ""
        self._start_all()
        try:
            self.connect()
        except (RankLostError, OSError) as error:
            self._lose(str(error))
            raise self._leave_groups(None) from None

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._loss = self._loss or reason
            for worker in self._workers:
                worker.process.kill()
            self._changed.notify_all()
        self._transport.interrupt()

    def _watch(self, workers: list[WatchedWorker]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.process.connection, selectors.EVENT_READ, worker)
            while not self._loss:
                for key, _ in selector.select(_TICK_SECONDS):
                    self._read_replies(key.data)
                if time.monotonic() - self._working_since > self._transport.max_step_seconds:
                    self._lose(f"a step has not ended for {self._transport.max_step_seconds:.0f} s")
                for worker in workers:
                    if worker.is_stopped():
                        self._lose(
                            f"rank {worker.rank} made no progress for {SILENT_SECONDS:.0f} s"
                        )
        for worker in workers:
            worker.process.connection.close()

    def _read_replies(self, worker: WatchedWorker) -> None:
        try:
            for reply in worker.replies():
                self._handle_reply(worker, reply)
        except EOFError:
            reason = worker.process.end_reason(_GRACE_SECONDS) or "closed its connection"
            self._lose(f"rank {worker.rank} {reason}")

    def _handle_reply(self, worker: WatchedWorker, reply: bytes) -> None:
        kind, body = reply[:1], reply[1:]
        if kind == READY and (identity := body.decode()) != self._identity:
            self._lose(
                f"rank {worker.rank} differs from rank 0, so results could differ: "
                f"{identity}, and {self._identity}"
            )
        elif kind == FAILED:
            (generation,) = GENERATION.unpack_from(body)
            reason = body[GENERATION.size :].decode(errors="replace")
            with self._changed:
                if reason and generation == self.generation:
                    self._failure = self._failure or f"rank {worker.rank}: {reason}"
                    self._changed.notify_all()
                    self._transport.interrupt()
        elif kind in (READY, ANSWER):
            with self._changed:
                worker.is_ready = True
                worker.answer = body if kind == ANSWER else worker.answer
                self._changed.notify_all()
        else:
            self._lose(f"rank {worker.rank}: {reply.decode(errors='replace')}")


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
