"""Interrupts, closing, garbage collection, forks and exits of an `LLM`: no step is ever cut."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine import thread as engine_thread
from headrace.errors import ClosedError, HeadraceError, RequestError, RequestFailedError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.test_llm import GREEDY, clean, llm, model, until  # noqa: F401 - fixtures

LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
Fixture = Any


def in_step(
    llm: LLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], None],
    at: int = 2,
) -> list[int]:
    """Call `act` in the middle of the `at`-th launch, and return a list that grows by one entry for
    each completed launch.
    """
    executable, ended = llm._engine._loop.executable, list[int]()
    launch, calls = executable.launch, iter(range(1, 10_000))

    def launch_and_act(*args: Any, **options: Any) -> Any:
        ticket = launch(*args, **options)
        if next(calls) == at:
            act()
        ended.append(at)
        return ticket

    monkeypatch.setattr(executable, "launch", launch_and_act)
    return ended


def interrupt() -> None:
    """Send Ctrl-C to the main thread, and give it time to arrive."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    for _ in range(2000):
        random.random()
    time.sleep(0.02)


class TestInterrupts:
    @pytest.mark.parametrize("num_prompts", [1, 3])
    def test_interrupt_does_not_cut_a_step(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
        num_prompts: int,
    ) -> None:
        expected = llm.generate("hello", GREEDY)[0].outputs
        ended = in_step(llm, monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "w", "hello w"][:num_prompts], LONG)
        assert clean(llm) and len(ended) >= 2
        assert llm.generate("hello", GREEDY)[0].outputs == expected

    def test_interrupt_leaves_other_threads_running(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        expected, results = llm.generate("w", LONG)[0].outputs, list[Any]()
        other = threading.Thread(target=lambda: results.append(llm.generate("w", LONG)[0].outputs))
        in_step(
            llm, monkeypatch, other.start, at=2
        )  # by then this thread is where an interrupt is expected
        in_step(llm, monkeypatch, interrupt, at=5)
        with pytest.raises(KeyboardInterrupt):
            while True:
                llm.generate("hello", LONG)
        other.join(60)
        assert results == [expected] and clean(llm)

    def test_interrupt_at_any_moment(self, llm: LLM) -> None:  # noqa: F811
        """A signal handler raises at random moments of the caller's code."""
        rng, expected, caught = random.Random(12), llm.generate("hello", GREEDY)[0].outputs, 0

        def raises(number: int, frame: Any) -> None:
            raise InterruptedError

        previous = signal.signal(signal.SIGALRM, raises)
        try:
            for _ in range(60):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.02))
                try:
                    llm.generate(["hello", "w"], GREEDY)
                    for _ in llm.stream("hello", GREEDY):
                        pass
                    llm.stats()
                    time.sleep(0.02)
                except InterruptedError:
                    caught += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert caught > 30 and clean(llm)
        assert llm.generate("hello", GREEDY)[0].outputs == expected


class TestCollection:
    def test_stream_collected_in_a_step_ends_after_it(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        expected, held = llm.generate("w", LONG)[0].outputs, list[Any]()
        lost = SimpleNamespace(stream=llm.stream("hello", LONG))
        lost.itself = lost  # so that it is the collector that ends it
        next(lost.stream)

        def collect() -> None:
            gc.collect()
            held.append(llm._engine._requests.keys() - {"2"})

        in_step(llm, monkeypatch, collect, at=3)
        del lost
        gc.disable()
        try:
            assert llm.generate("w", LONG)[0].outputs == expected
        finally:
            gc.enable()
        assert held == [{"1"}] and clean(llm) and llm.stats().aborted == 1

    @pytest.mark.parametrize("use", ["close", "stats"])
    def test_finaliser_in_a_step_never_waits(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
        use: str,
    ) -> None:
        said = []

        def finalise() -> None:
            try:
                getattr(llm, use)()
            except HeadraceError as error:
                said.append(str(error))

        in_step(llm, monkeypatch, finalise)
        if use == "close":
            with pytest.raises(ClosedError, match="the engine is closed"):
                llm.generate("hello", LONG)
            assert said == []
        else:
            assert llm.generate("hello", GREEDY)[0].finished
            assert said == ["the engine cannot be called from within its own step"]

    def test_dropped_llm_is_collected(self, model: str) -> None:  # noqa: F811
        until(lambda: not threads_named("headrace-engine"))  # those of other tests
        before = len(os.listdir("/proc/self/task"))
        llm = LLM(model, threads=2, max_model_len=64)  # noqa: F811
        llm.generate("hello", GREEDY)
        del llm

        def all_gone() -> bool:
            gc.collect()
            return (
                len(os.listdir("/proc/self/task")) <= before
            )  # a thread of a library may end, too

        until(all_gone)


class TestClosing:
    def test_close_wakes_waiting_threads(self, model: str) -> None:  # noqa: F811
        llm, said = LLM(model, backend="reference"), list[str]()  # noqa: F811

        def work() -> None:
            try:
                while True:
                    llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
            except ClosedError as error:
                said.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        until(lambda: llm.stats().running == 4)
        closing = [threading.Thread(target=llm.close) for _ in range(3)]
        for each in closing:
            each.start()
        llm.close()
        for each in closing + threads:
            each.join(60)
            assert not each.is_alive()
        assert said == ["the engine is closed"] * 4
        llm.close()

    def test_close_in_a_signal_handler(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        previous = signal.signal(signal.SIGINT, lambda number, frame: llm.close())
        try:
            in_step(llm, monkeypatch, interrupt)
            with pytest.raises(ClosedError):
                llm.generate("hello", LONG)
        finally:
            signal.signal(signal.SIGINT, previous)

    def test_fatal_engine_error_closes_the_llm(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fails(*args: Any) -> Any:
            raise SystemError("beyond repair")

        monkeypatch.setattr(llm._engine, "step", fails)
        for use in (lambda: llm.generate("hello"), llm.stats, lambda: list(llm.stream("hello"))):
            with pytest.raises(
                ClosedError, match=r"the engine stopped after an internal error: .*beyond repair"
            ):
                use()
        llm.close()

    def test_close_gives_up_if_the_engine_hangs(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fails(*args: Any) -> Any:
            raise MemoryError

        unhandled = list[Any]()
        monkeypatch.setattr(threading, "excepthook", unhandled.append)
        monkeypatch.setattr(llm._engine, "step", fails)
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine, "close", fails)
            with pytest.raises(ClosedError, match="MemoryError"):
                llm.generate("hello")
            until(lambda: not llm._thread._lock.locked())
        assert unhandled == [] and llm._thread._is_released
        llm._engine.close()


class TestEngineThread:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_thread, "_LINGER", 0)

    def test_engine_thread_ends_without_work(self, llm: LLM) -> None:  # noqa: F811
        llm.generate("hello", GREEDY)
        until(lambda: not threads_named("headrace-engine"))
        assert llm.generate("hello", GREEDY)[0].finished

    def test_engine_thread_during_a_step(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        seen, started = list[Any](), time.monotonic()

        def look() -> None:
            thread, begun = threading.current_thread(), llm._thread.step_started
            seen.append(
                (
                    thread.name,
                    thread.daemon,
                    begun is not None and started <= begun <= time.monotonic(),
                )
            )

        in_step(llm, monkeypatch, look)
        assert llm._thread.step_started is None
        llm.generate("hello", GREEDY)
        assert seen == [("headrace-engine", True, True)]
        until(lambda: llm._thread.step_started is None)

    def test_engine_thread_sees_waiting_commands_in_a_step(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        known = list[bool]()

        def look() -> None:
            known.append(llm._thread._has_commands())
            llm._thread.abort(["nobody"])
            known.append(llm._thread._has_commands())

        in_step(llm, monkeypatch, look)
        llm.generate("hello", GREEDY)
        assert known == [False, True]

    def test_engine_thread_waits_for_commands_only_when_idle(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(engine_thread, "_LINGER", 0.01)
        drain, waits = llm._thread._run_commands, set[tuple[bool, float]]()

        def watched(seconds: float) -> None:
            waits.add((llm._engine.has_work, seconds))
            drain(seconds)

        monkeypatch.setattr(llm._thread, "_run_commands", watched)
        llm.generate("hello", GREEDY)
        assert waits == {(False, 0.01), (True, 0)}

    def test_engine_thread_lingers_for_the_next_command(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(engine_thread, "_LINGER", 60)
        threads = list[threading.Thread]()
        in_step(llm, monkeypatch, lambda: threads.append(threading.current_thread()))
        llm.generate("hello", GREEDY)
        time.sleep(0.02)  # in which it would end
        assert [llm._thread.call(threading.current_thread)] == threads

    def test_errors_of_commands_reach_the_caller(self, llm: LLM) -> None:  # noqa: F811
        with pytest.raises(ZeroDivisionError):
            llm._thread.call(lambda: 1 // 0)
        assert llm._thread.call(lambda: 1) == 1
        inbox = engine_thread.Inbox()
        llm._thread.add([llm._engine.check([5], GREEDY)] * 2, ["a", "a"], inbox)
        with pytest.raises(RequestError, match="is in use; choose another id"):
            inbox.get()

    @pytest.mark.parametrize("only_results", [False, True])
    def test_only_results_receiver_gets_no_other_update(
        self,
        llm: LLM,  # noqa: F811
        only_results: bool,
    ) -> None:
        inbox = engine_thread.Inbox()
        llm._thread.add([llm._engine.check([5], GREEDY)], ["a"], inbox, only_results=only_results)
        updates = [inbox.get()]
        while not updates[-1].result:
            updates.append(inbox.get())
        assert (len(updates) == 1) == only_results

    def test_no_command_is_lost_when_the_engine_thread_ends(self, llm: LLM) -> None:  # noqa: F811
        """Commands arrive at every moment of the thread's end."""
        counts = [0] * 3

        def work(i: int) -> None:
            for _ in range(150):
                llm.stats()
                counts[i] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
        assert counts == [150] * 3
        until(lambda: not threads_named("headrace-engine"))

    def test_system_out_of_threads(
        self,
        llm: LLM,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(*args: Any, **options: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(engine_thread, "start_new_thread", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                llm.generate("hello", GREEDY)
        assert llm.generate("hello", GREEDY)[0].finished and clean(llm)
        monkeypatch.setattr(engine_thread, "Thread", refuse)
        assert llm.generate("hello", GREEDY)[0].finished
        until(lambda: not llm._thread._lock.locked())
        monkeypatch.setattr(engine_thread, "start_new_thread", refuse)
        llm.close()
        assert llm._thread._is_released


def threads_named(beginning: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(beginning)]


PRELUDE = """
import gc, os, signal, sys, threading, time
from headrace import LLM, SamplingParams
from headrace.errors import ClosedError
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
llm = LLM(sys.argv[1], threads=2)
def run(): llm.generate(["hello", "w"], LONG)
def generate_in_a_daemon():
    def work():
        try:
            while True: run()
        except ClosedError: pass  # as the process ends
    threading.Thread(target=work, daemon=True).start()
    while not llm.stats().running: pass
def child(work):
    pid = os.fork()
    if not pid: work(); sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, status
def refused():
    for use in (run, llm.stats, lambda: list(llm.stream("hello")), lambda: next(s)):
        try: use()
        except ClosedError as error: assert "make another LLM here" in str(error), error
        else: raise AssertionError("it was served")
"""


FORKS = """
s = llm.stream('hello', LONG)
first = next(s)
child(refused)
child(lambda: None)
child(s.close)
child(llm.close)
child(lambda: (globals().pop('llm'), globals().pop('s'), gc.collect()))
child(lambda: LLM(sys.argv[1], threads=2).generate('hello', LONG))
import multiprocessing
p = multiprocessing.get_context('fork').Process(target=refused)
p.start(); p.join()
assert not p.exitcode
assert sum(len(update.token_ids) for update in (first, *s)) == 24
run()
"""


@pytest.mark.parametrize(
    "code",
    [
        "generate_in_a_daemon()",
        "stream = llm.stream('hello', LONG); next(stream); import atexit; "
        "atexit.register(llm.close)",
        "t = threading.Thread(target=run); t.start()",
        "run()\n" + FORKS,
        "generate_in_a_daemon()\n" + FORKS,
    ],
    ids=["daemon", "streams", "thread", "forks", "forks in a step"],
)
def test_process_exit_is_clean(model: str, code: str) -> None:  # noqa: F811
    """A process with any threads and forks exits with code 0 and no output."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", PRELUDE + code, model]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_failure_of_one_call_does_not_affect_another(
    llm: LLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, results = llm.generate("w", GREEDY)[0].outputs, list[Any]()

    def fail() -> None:
        raise OSError("the device is lost")

    for _ in range(2):  # it is tried once more
        in_step(llm, monkeypatch, fail, at=1)
    with pytest.raises(
        RequestFailedError, match="1 of 1 requests failed; prompt 0: the device is lost"
    ) as error:
        llm.generate("hello", GREEDY)
    assert (
        isinstance(error.value.outputs[0].error, OSError)
        and error.value.outputs[0].outputs[0].finish_reason == "error"
    )
    assert llm.generate("w", GREEDY)[0].outputs == expected and clean(llm) and not results
