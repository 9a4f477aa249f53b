"""The processes of all ranks but the first: started, told what to do, watched, and started again
when one is lost.

A process that ends closes its socket, which is seen at once; one that is stopped gives no sign of
life, and is killed after `_SILENT` seconds. The others are ended with it, so that no exchange waits
for what does not come.
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
from headrace.parallel.commands import Command, Kind, encode
from headrace.parallel.launch import INTERFACE, Launcher, Process
from headrace.parallel.transport import GlooCarrier
from headrace.parallel.worker import READY, REPLY, STAGE_STEPS

_SILENT = 3.0
"""Seconds without a sign of life, and without having run, after which a process is taken to be
stopped.
"""
_TICK = 0.25
_LOADED = 1800.0
"""Seconds that a rank may take to load its share."""
_GRACE = 3.0
"""Seconds that a process has to end by itself."""
_MOST_RESTARTS = 3
_RESTART_SECONDS = 600.0

log = logging.getLogger("headrace.parallel")


@dataclass
class _Follower:
    """A process, and what it has said."""

    rank: int
    process: Process
    is_ready: bool = False
    alive: float = field(default_factory=time.monotonic)
    """When it was last heard, or found to have run."""
    is_heard: bool = False
    stage_steps: NDArray[np.float64] | None = None
    """What it has answered when it was asked for them."""
    ticks: int | None = None
    buffer: bytearray = field(default_factory=bytearray)


class Followers:
    """The other ranks of a mesh. Used by one thread; another watches."""

    def __init__(
        self,
        launcher: Launcher,
        setups: Sequence[Mapping[str, Any]],
        carrier: GlooCarrier,
        alike: str,
    ) -> None:
        """A process is told its setup first, as JSON. `alike`: what each must say of itself, since
        this one is so (`rank.identity`).
        """
        self._launcher, self._setups, self._carrier, self._alike = launcher, setups, carrier, alike
        self._said: list[bytes] = []
        """Commands that change what a rank has, which one that is started again is told."""
        self._changed = Condition()
        self._why = ""
        """What has broken the group; empty while it is whole."""
        self._is_told = False
        self.generation = 0
        """How often the ranks were started again."""
        self._restarts: list[float] = []
        self._store: TCPStore | None = None
        self._followers: list[_Follower] = []
        self._begin()

    @contextmanager
    def at_work(self, since: int | None = None) -> Iterator[None]:
        """All ranks are there when it begins. Raises RankLostError where one is lost meanwhile, or
        was lost before, once: then what all of them kept is gone, and the next time they are
        started again; but not for work that began with an earlier `generation`.
        """
        if (
            since not in (None, self.generation)
            or (self._why and not self._is_told)
            or (self._why and since is not None)
        ):
            self._is_told = True
            raise RankLostError(self._why or "the rank that ran this was lost")
        if self._why:
            self._restart()
        try:
            yield
        except Exception as error:
            self._break(
                str(error)
                if isinstance(error, RankLostError)
                else f"{type(error).__name__}: {error}"
            )
            self._is_told = True
            if isinstance(error, RankLostError | OSError):
                raise RankLostError(self._why) from None
            raise

    def join(self) -> None:
        """Wait until all ranks are loaded, and link them. Raises RankLostError, with what it says,
        where one ends instead.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._why or all(one.is_ready for one in self._followers), _LOADED
            )
            if self._why:
                raise RankLostError(self._why)
        host = self._launcher.host
        listener = socket.create_server((host, 0))  # and not on all interfaces, as the store would
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.send(Command(Kind.JOIN, 0, [ints([port])]))
        with _over(self._launcher.interface):
            self._carrier.connect(self._linked(self._store))
        for said in self._said:
            self._send(said)

    def _linked(self, store: TCPStore) -> tuple[Any, Any]:
        """The groups of the carrier, which a thread waits for: torch would wait for minutes for a
        rank that is lost meanwhile.
        """
        groups: Future[tuple[Any, Any]] = Future()

        def link() -> None:
            try:
                groups.set_result(self._carrier.groups(store))
            except Exception as error:
                groups.set_exception(error)

        Thread(target=link, daemon=True).start()
        while not groups.done() and not self._why:
            wait([groups], _TICK)
        if not groups.done():
            raise RankLostError(self._why)
        return groups.result()

    def send(self, command: Command) -> None:
        """Tell all ranks to do something. Raises OSError where one has gone."""
        self._send(encode(command))

    def remember(self, command: Command) -> None:
        """Tell all ranks to do something that those which are started again are told as well."""
        self._said.append(encode(command))
        if not self._why:
            with self.at_work():
                self._send(self._said[-1])

    def stage_steps(self) -> dict[int, NDArray[np.float64]]:
        """When the last steps ran on each rank, [steps, (begin, end)] in seconds by the clock of
        its machine, and are done.
        """
        for one in self._followers:
            one.stage_steps = None
        self.send(Command(Kind.STAGE_STEPS))
        with self._changed:
            self._changed.wait_for(
                lambda: self._why or all(one.stage_steps is not None for one in self._followers)
            )
            if self._why:
                raise RankLostError(self._why)
        return {one.rank: one.stage_steps for one in self._followers if one.stage_steps is not None}

    def close(self) -> None:
        """End all processes."""
        with suppress(OSError):
            if not self._why:
                self.send(Command(Kind.CLOSE))
        deadline = time.monotonic() + _GRACE
        for one in self._followers:
            one.process.ended(max(0.0, deadline - time.monotonic()))
        self._break("closed")
        self._launcher.close()
        self._carrier.disconnect()

    def _begin(self) -> None:
        """Start the processes, in the thread that watches them: the system ends them with it,
        should this process end.
        """
        started = Event()
        self._watcher = Thread(target=self._run, args=(started,), daemon=True)
        self._watcher.start()
        started.wait()

    def _run(self, started: Event) -> None:
        self._followers = []
        try:
            for setup in self._setups:
                self._followers.append(self._start(setup))
        except OSError as error:
            self._break(f"a process could not be started: {error}")
        finally:
            started.set()
        self._watch(self._followers)

    def _start(self, setup: Mapping[str, Any]) -> _Follower:
        process, body = self._launcher.start(setup["rank"]), json.dumps(setup).encode()
        process.connection.sendall(REPLY.pack(len(body)) + body)
        return _Follower(setup["rank"], process)

    def _restart(self) -> None:
        """Start all ranks again. Raises RankLostError where that has been done too often, or one
        ends again.
        """
        now = time.monotonic()
        self._restarts = [*(at for at in self._restarts if now - at < _RESTART_SECONDS), now]
        if len(self._restarts) > _MOST_RESTARTS:
            raise RankLostError(
                f"{self._why}; ranks were started again {_MOST_RESTARTS} times in "
                f"{_RESTART_SECONDS / 60:.0f} minutes"
            )
        log.error("%s; the ranks are started again", self._why)
        self._carrier.disconnect()
        self._watcher.join()  # which would take the end of the old ranks for that of new ones
        self._why, self._is_told = "", False
        self.generation += 1
        self._begin()
        try:
            self.join()
        except (RankLostError, OSError) as error:
            self._break(str(error))
            self._is_told = True
            raise RankLostError(self._why) from None

    def _send(self, data: bytes) -> None:
        for one in self._followers:
            one.process.connection.sendall(data)

    def _break(self, why: str) -> None:
        """End all processes: the group is broken."""
        with self._changed:
            self._why = self._why or why
            for one in self._followers:
                one.process.kill()
            self._changed.notify_all()

    def _watch(self, followers: list[_Follower]) -> None:
        """Hear what the ranks say until the group is broken."""
        with selectors.DefaultSelector() as selector:
            for one in followers:
                selector.register(one.process.connection, selectors.EVENT_READ, one)
            while not self._why:
                for key, _ in selector.select(_TICK):
                    if why := self._hear(key.data):
                        self._break(why)
                for one in followers:
                    if self._is_stopped(one):
                        self._break(f"rank {one.rank} stood still for {_SILENT:.0f} s")
        for one in followers:
            one.process.connection.close()

    def _hear(self, one: _Follower) -> str:
        """Read what a rank says; why the group is broken by it, or nothing."""
        try:
            chunk = one.process.connection.recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            return f"rank {one.rank} {one.process.ended(_GRACE) or 'closed its connection'}"
        one.alive, one.is_heard = time.monotonic(), True
        one.buffer += chunk
        while len(one.buffer) >= REPLY.size:
            end = REPLY.size + REPLY.unpack_from(one.buffer)[0]
            if len(one.buffer) < end:
                break
            said = bytes(one.buffer[REPLY.size : end])
            del one.buffer[:end]
            if said.startswith(READY):
                if (other := said[len(READY) :].decode()) != self._alike:
                    return (
                        f"rank {one.rank} is not like rank 0, so their numbers could differ: "
                        f"{other}, and {self._alike}"
                    )
                with self._changed:
                    one.is_ready = True
                    self._changed.notify_all()
            elif said.startswith(STAGE_STEPS):
                with self._changed:
                    one.stage_steps = np.frombuffer(said[len(STAGE_STEPS) :]).reshape(-1, 2)
                    self._changed.notify_all()
            elif said:
                return f"rank {one.rank}: {said.decode(errors='replace')}"
        return ""

    def _is_stopped(self, one: _Follower) -> bool:
        """Whether nothing is heard of a process that does not run either, as one does that is only
        kept busy, or begins.
        """
        if not one.is_heard and one.process.ticks() is None:
            return False
        if time.monotonic() - one.alive > _SILENT and (ticks := one.process.ticks()) != one.ticks:
            one.alive, one.ticks = time.monotonic() - _SILENT / 2, ticks
        return time.monotonic() - one.alive > _SILENT


@contextmanager
def _over(interface: str) -> Iterator[None]:
    """The environment says that gloo is to use this interface."""
    before = os.environ.get(INTERFACE)
    if interface:
        os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)
        if before is not None:
            os.environ[INTERFACE] = before
