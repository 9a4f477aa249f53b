"""The thread of an engine: it alone touches the engine, one command or one step at a time.

Signal handlers and finalisers interrupt a waiting caller and never a step. They may call
`SimpleQueue.put`, which takes no lock that their thread may hold. An `atexit` hook closes all
engines, before interpreter exit cuts daemon threads off.
"""

import atexit
import logging
import os
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Protocol, TypeVar
from weakref import WeakSet

from headrace.engine.engine import Engine
from headrace.errors import ClosedError, DeviceLostError, HeadraceError
from headrace.outputs import Update
from headrace.request import CheckedRequest

_T = TypeVar("_T")
_LINGER = 0.1
"""Seconds that an idle thread waits: a start costs a tenth of a small model's step."""
_CLOSED = "the engine is closed"
_FORKED = (
    "the engine runs in the process that this process was forked from, and its thread was not "
    "copied; make another LLM here or start processes with the 'spawn' method"
)

_log = logging.getLogger("headrace.engine")
_threads = WeakSet["EngineThread"]()


class Receiver(Protocol):
    def put(self, item: Update | BaseException, /) -> None:
        """Receive an update, or the error that ends all updates.

        The engine's thread calls this method, so it must neither block nor raise.
        """


class Inbox:
    """Queues the updates of one call until the caller reads them."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Update | BaseException] = SimpleQueue()
        self._pid = os.getpid()

    def put(self, item: Update | BaseException) -> None:
        self._items.put(item)

    def get(self) -> Update:
        """Wait for the next update. Raises the error that ended the call."""
        if os.getpid() != self._pid:
            raise ClosedError(_FORKED)
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class EngineThread:
    """An engine and its thread, for any thread, signal handler or finaliser.

    In a forked process every call except `close` raises ClosedError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = allocate_lock()
        self._ident: int | None = None
        self.step_started: float | None = None
        """Seconds of the monotonic clock; None between steps."""
        self._receivers: dict[str, Receiver] = {}
        self._pid = os.getpid()
        self._close_reason = ""
        self._is_released = False
        if engine.learner:
            engine.learner.wake_with(self._post)
        _threads.add(self)

    @property
    def closed(self) -> bool:
        return bool(self._close_reason) or os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise ClosedError after `close` or in another process."""
        if os.getpid() != self._pid:
            raise ClosedError(_FORKED)
        if self._close_reason:
            raise ClosedError(self._close_reason)

    def add(
        self,
        requests: Sequence[CheckedRequest],
        ids: Sequence[str],
        receiver: Receiver,
        *,
        only_results: bool = False,
    ) -> None:
        """Queue requests, all before the next step, without waiting.

        With `only_results` the receiver gets only last updates and errors. A caller that does not
        wait for the end of its requests must abort them.
        """
        self._post(lambda: self._add(requests, ids, receiver, only_results))

    def abort(self, ids: Iterable[str]) -> None:
        """End requests, without waiting. Unknown ids are ignored, and the call never raises."""
        if os.getpid() == self._pid:
            # No thread has to be started. Without a thread, either the engine has no requests, or
            # the command that adds them is still in the queue before this one.
            self._commands.put(lambda: self._abort(ids))

    def release(self, names: Iterable[str]) -> None:
        """Stop keeping the KV of paths, without waiting. Never raises."""
        self._post_quietly(lambda: self._engine.release(names))

    def release_all(self, prefix: str) -> None:
        """Stop keeping the KV of all paths whose names begin with `prefix`, without waiting."""
        self._post_quietly(lambda: self._engine.release_all(prefix))

    def _post_quietly(self, command: Callable[[], None]) -> None:
        """Queue a command for the next step or call. An engine without a step needs no thread."""

        def unless_closed() -> None:
            if not self._is_released:
                command()

        if os.getpid() == self._pid:
            self._commands.put(unless_closed)

    def finish(self, request_id: str) -> None:
        """End a request as a stop string would, without waiting; an unknown id is ignored."""
        self._commands.put(lambda: self._finish(request_id))

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function between two steps. Raises its error; DeviceLostError also closes the
        engine.
        """
        self.check_open()
        if get_ident() == self._ident:
            raise HeadraceError("the engine cannot be called from within its own step")
        response: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

        def command() -> None:
            try:
                self.check_open()
                response.put((function(), None))
            except BaseException as error:
                response.put((None, error))
                if isinstance(error, DeviceLostError):
                    raise

        self._post(command)
        value, error = response.get()
        if error:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """End all requests, whose callers get a ClosedError, and free the memory.

        Waits for the current step, except in a finaliser within that step. May be called more
        than once.
        """
        self._close_reason = self._close_reason or _CLOSED
        if os.getpid() != self._pid or self._is_released:
            return
        done: SimpleQueue[None] = SimpleQueue()

        def command() -> None:
            self._close()
            done.put(None)

        self._commands.put(command)
        if get_ident() != self._ident:
            try:
                self._start()
            except RuntimeError:  # the system gives no more threads
                self._run()
            done.get()

    def _post(self, command: Callable[[], None]) -> None:
        self.check_open()
        self._commands.put(command)
        self._start()

    def _start(self) -> None:
        """Start the thread if it does not run. Raises RuntimeError if the system has no more
        threads.

        A helper thread does it, because a signal within `Thread.start` would leave a half-started
        thread.
        """
        if not self._lock.locked():
            start_new_thread(self._launch, ())

    def _launch(self) -> None:
        try:
            Thread(target=self._run, name="headrace-engine", daemon=True).start()
        except Exception:
            self._run()  # the helper thread takes over

    def _run(self) -> None:
        """Serve until idle. A command that arrives during the return is seen or starts another
        thread.
        """
        while self._lock.acquire(blocking=False):
            self._ident = get_ident()
            try:
                self._serve()
            finally:
                self._ident = None
                self._lock.release()
            if self._commands.empty():
                return

    def _serve(self) -> None:
        while True:
            try:
                is_busy = self._is_released or self._engine.has_work
                self._run_commands(0 if is_busy else _LINGER)
                if self._is_released or not self._engine.has_work:
                    return
                self.step_started = monotonic()
                for update in self._engine.step(self._has_commands):
                    self._deliver(update)
                self.step_started = None
            except BaseException as error:  # the engine cannot recover: see `Engine.step`
                self._close_reason = (
                    str(error)
                    if isinstance(error, DeviceLostError)
                    else f"the engine stopped after an internal error: {error!r}"
                )
                _log.critical("%s", self._close_reason)
                with suppress(Exception):
                    self._close()

    def _has_commands(self) -> bool:
        return not self._commands.empty()

    def _run_commands(self, timeout: float) -> None:
        with suppress(Empty):
            self._commands.get(timeout=timeout)()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()

    def _add(
        self,
        requests: Iterable[CheckedRequest],
        ids: Iterable[str],
        receiver: Receiver,
        only_results: bool,
    ) -> None:
        try:
            self.check_open()
            for request_id, request in zip(ids, requests, strict=True):
                self._engine.add(request, request_id, only_result=only_results)
                self._receivers[request_id] = receiver
        except BaseException as error:
            receiver.put(error)

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._receivers.pop(request_id, None)
            if not self._is_released:
                self._engine.abort(request_id)

    def _finish(self, request_id: str) -> None:
        if not self._is_released:
            for update in self._engine.finish(request_id):
                self._deliver(update)

    def _deliver(self, update: Update) -> None:
        receiver = self._receivers[update.request_id]
        if update.result:
            del self._receivers[update.request_id]
        receiver.put(update)

    def _close(self) -> None:
        if self._is_released:
            return
        receivers = {id(receiver): receiver for receiver in self._receivers.values()}
        self._receivers.clear()
        for receiver in receivers.values():
            receiver.put(ClosedError(self._close_reason))
        try:
            self._engine.close()
        finally:
            self._is_released = True


@atexit.register
def _close_all() -> None:
    """Close all engines before interpreter exit cuts their threads off."""
    for thread in list(_threads):
        thread._receivers.clear()
        while True:
            try:
                thread.close()
                break
            except KeyboardInterrupt:  # the current step must end, which does not take long
                continue
