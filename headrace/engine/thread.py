"""The thread of an engine: everything that touches an engine runs in it, one command or one step
after the other.

So a step is atomic. An exception of a signal handler (Ctrl-C), or a finaliser that the garbage
collector runs, meets a caller that waits, and never the middle of a step. What it wants of the
engine is one more command, which is carried out between two steps.

A command is put in a `SimpleQueue`, which takes no lock that its own thread could hold already:
signal handlers and finalisers may do it at any point. The thread starts with the first command and
ends when there has been no work for `_LINGER` seconds. It is a daemon thread, which interpreter
exit would cut off in a native call; so an `atexit` hook closes all engines before that.

A process that was forked has no such thread. There every call ends with a ClosedError, and `close`
does nothing.
"""

import atexit
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
from headrace.errors import ClosedError, HeadraceError
from headrace.outputs import Update
from headrace.request import CheckedRequest

_T = TypeVar("_T")
_LINGER = 0.1
"""Seconds for which the thread waits for more work before it ends: to start one takes as long as a
tenth of a small model's step.
"""
_CLOSED = "the engine is closed"
_FORKED = (
    "this process was forked from the one that the engine works in, and has no copy of "
    "its threads: "
    "make another LLM here, or start processes with the 'spawn' method"
)

_threads = WeakSet["EngineThread"]()
"""All that may have to be closed at exit."""


class Receiver(Protocol):
    """Where the updates of requests go."""

    def put(self, item: Update | BaseException, /) -> None:
        """Take an update, or the reason why there will be no more, in the engine's thread: must not
        block, and raises nothing.
        """


class Inbox:
    """A receiver that is asked for the updates of the requests of one call, in the order in which
    they come.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Update | BaseException] = SimpleQueue()
        self._pid = os.getpid()

    def put(self, item: Update | BaseException) -> None:
        """Add an update, or the reason why there will be no more. Wakes the caller that waits."""
        self._items.put(item)

    def get(self) -> Update:
        """The next update, waited for. Raises what ended the call: a ClosedError, or the error of
        adding its requests.
        """
        if os.getpid() != self._pid:
            raise ClosedError(_FORKED)
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class EngineThread:
    """An engine and the thread that it runs in. All methods may be called from any thread, signal
    handler or finaliser.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._at_work = allocate_lock()
        """Held by the one thread that touches the engine."""
        self._ident: int | None = None
        """That thread."""
        self.step_begun: float | None = None
        """When the step that runs began, by the system's monotonic clock; None between steps."""
        self._routes: dict[str, Receiver] = {}
        """Where the updates of a request go, by its id."""
        self._pid = os.getpid()
        self._why_closed = ""
        self._is_released = False
        """Whether closing has come to its end."""
        _threads.add(self)

    @property
    def closed(self) -> bool:
        """Whether there is nothing to be had any more."""
        return bool(self._why_closed) or os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise ClosedError where there is nothing to be had any more."""
        if os.getpid() != self._pid:
            raise ClosedError(_FORKED)
        if self._why_closed:
            raise ClosedError(self._why_closed)

    def add(
        self,
        requests: Sequence[CheckedRequest],
        ids: Sequence[str],
        receiver: Receiver,
        *,
        only_results: bool = False,
    ) -> None:
        """Queue requests, all before the next step; with `only_results`, only the last update of
        each goes to the receiver.

        Waits for nothing: what goes wrong goes to the receiver. The caller aborts them if it does
        not wait for their end.
        """
        self._post(lambda: self._add(requests, ids, receiver, only_results))

    def abort(self, ids: Iterable[str]) -> None:
        """End requests; those that have ended, or never came, are no matter. Waits for nothing, and
        raises nothing.
        """
        if os.getpid() == self._pid:
            # No thread has to be started: where there is none, the requests are not in the engine,
            # or their queue is still to be read.
            self._commands.put(lambda: self._abort(ids))

    def call(self, function: Callable[[], _T]) -> _T:
        """What the function returns or raises in the thread of the engine, between two steps."""
        self.check_open()
        if get_ident() == self._ident:
            raise HeadraceError("the engine cannot be asked from within one of its own steps")
        answer: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

        def command() -> None:
            try:
                self.check_open()
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))

        self._post(command)
        value, error = answer.get()
        if error:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """End all requests, whose callers get a ClosedError, and give the memory back. Waits for
        the end of the step that runs.

        May be called more than once. Within a step, where a finaliser may call it, it does not
        wait.
        """
        self._why_closed = self._why_closed or _CLOSED
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
            except RuntimeError:  # no thread can be started, but one of the engine may be there
                self._run()
            done.get()

    def _post(self, command: Callable[[], None]) -> None:
        self.check_open()
        self._commands.put(command)
        self._start()

    def _start(self) -> None:
        """See to it that there is a thread after a command was put in the queue.

        It is started by another, which no signal reaches: `Thread.start` left half way by an
        exception would leave half a thread behind. Raises RuntimeError where the system gives no
        more threads.
        """
        if not self._at_work.locked():
            start_new_thread(self._launch, ())

    def _launch(self) -> None:
        try:
            Thread(target=self._run, name="headrace-engine", daemon=True).start()
        except Exception:  # this one must do
            self._run()

    def _run(self) -> None:
        """Serve until there is no more work. A command that comes as this ends finds the lock free,
        or is found here.
        """
        while self._at_work.acquire(blocking=False):
            self._ident = get_ident()
            try:
                self._serve()
            finally:
                self._ident = None
                self._at_work.release()
            if self._commands.empty():
                return

    def _serve(self) -> None:
        """Carry out commands and run steps until both have been wanting for a while."""
        while True:
            try:
                self._drain(0 if self._is_released or self._engine.has_work else _LINGER)
                if self._is_released or not self._engine.has_work:
                    return
                self.step_begun = monotonic()
                for update in self._engine.step(self._command_waits):
                    self._deliver(update)
                self.step_begun = None
            except BaseException as error:  # what it does not get over: see `Engine.step`
                self._why_closed = f"the engine has ended by an error of its own: {error!r}"
                with suppress(Exception):
                    self._close()

    def _command_waits(self) -> bool:
        """Whether a command waits."""
        return not self._commands.empty()

    def _drain(self, seconds: float) -> None:
        """Carry out the commands that are there, the first of which is waited for so long; those
        that follow come after a step.
        """
        with suppress(Empty):
            self._commands.get(timeout=seconds)()
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
                self._routes[request_id] = receiver
        except BaseException as error:
            receiver.put(error)

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._routes.pop(request_id, None)
            if not self._is_released:
                self._engine.abort(request_id)

    def _deliver(self, update: Update) -> None:
        receiver = (
            self._routes.pop(update.request_id)
            if update.result
            else self._routes[update.request_id]
        )
        receiver.put(update)

    def _close(self) -> None:
        if not self._is_released:
            receivers = {id(receiver): receiver for receiver in self._routes.values()}
            self._routes.clear()
            for receiver in receivers.values():
                receiver.put(ClosedError(self._why_closed))
            try:
                self._engine.close()
            finally:
                self._is_released = True


@atexit.register
def _close_all() -> None:
    """Close all engines before interpreter exit cuts their threads off. Threads that wait then are
    daemons, and are not woken again.
    """
    for thread in list(_threads):
        thread._routes.clear()
        while True:
            try:
                thread.close()
                break
            except KeyboardInterrupt:  # a step ends soon, and must
                continue
