"""The process that renders chat templates: its limits, its end, and its start in the
background.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import UserList
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from headrace import LLM
from headrace.checkpoint import templates
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.templates import Renderer
from headrace.errors import ClosedError, RequestError

USER = [{"role": "user", "content": "hello"}]
PLAIN = "{{ messages[0].content }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def render(renderer: Renderer, template: str = PLAIN, messages: Any = USER) -> str:
    return renderer.render(template, messages, named_tokens={}).text


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Collect the processes and descriptors of earlier tests, which would end during a test."""
    gc.collect()


def pid_of(renderer: Renderer) -> int:
    assert renderer._worker
    return renderer._worker._process.pid


def children() -> set[int]:
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for_the_end_of(pid: int) -> None:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("the process lives on")


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


class TestLimits:
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ '%1000000000d'|format(1) }}", "took more than 512 MB"),
            ("{{ 'a'|center(10**9) }}", "took more than 512 MB"),
            ("{{ 'a\nb'|indent(10**9) }}", "took more than 512 MB"),
            (
                "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = "
                "ns.s + ns.s %}{% endfor %}",
                "took more than 512 MB",
            ),
            (
                "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = "
                "ns.s ~ ns.s %}{% endfor %}",
                "took more than 512 MB",
            ),
            ("{{ ('a' * 9999)|replace('a', 'a' * 99999) }}", "took more than 512 MB"),
            ("{{ 10 ** (10 ** 10) }}", "took more than 1 s"),
            (ENDLESS, "took more than 1 s"),
        ],
    )
    def test_time_and_memory_of_a_rendering(
        self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, template: str, message: str
    ) -> None:
        monkeypatch.setattr(templates, "_SECONDS", 1)
        before = children()
        with pytest.raises(RequestError, match=f"^the chat template {message}; "):
            render(renderer, template)
        assert render(renderer) == "hello"
        assert len(children() - before) == 1, "another process"

    def test_recursion_limit(self, renderer: Renderer) -> None:
        """A process that survives a template is used again."""
        render(renderer)
        pid = pid_of(renderer)
        for template in (
            "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
            "{{ " + "[" * 400 + "]" * 400 + " }}",
            "{{ -" * 3000,
        ):
            with pytest.raises((RequestError, templates.FormatError)):
                render(renderer, template)
        assert render(renderer) == "hello" and pid_of(renderer) == pid

    def test_wall_clock_limit(self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stopped process uses no CPU time."""
        render(renderer)
        os.kill(pid_of(renderer), signal.SIGSTOP)
        monkeypatch.setattr(templates, "_PATIENCE", 0.1)
        with pytest.raises(RequestError, match=r"^the chat template took more than 0.1 s; "):
            render(renderer)
        monkeypatch.undo()
        assert render(renderer) == "hello"

    def test_files_cannot_be_opened(self, renderer: Renderer) -> None:
        render(renderer)
        limits = Path(f"/proc/{pid_of(renderer)}/limits").read_text()
        for name in ("Max open files", "Max file size", "Max processes", "Max core file size"):
            (line,) = (line for line in limits.splitlines() if line.startswith(name))
            assert line.removeprefix(name).split()[:2] == ["0", "0"]
        assert len(os.listdir(f"/proc/{pid_of(renderer)}/fd")) == 3

    def test_late_imports_of_jinja(self, renderer: Renderer) -> None:
        template = r"""{{ 'x\N{BULLET}\n'|pprint }}{{ 'a b'|wordwrap(1) }}{{ '<i>'|striptags }}{{ strftime_now('%B %Z')|length > 1 }}
            {{- 'a' | urlize }}{{ [3, 1]|sort }}{{ 'é'.encode('utf-8') }}{{ 5|filesizeformat }}{{ {'a': 1}|xmlattr }}{{ 'x'|urlencode }}"""
        assert render(renderer, template).startswith("'x•\\n'a\nb")

    @pytest.mark.parametrize("size", [70_000, 1_000_000])
    def test_long_templates_and_messages_pass_through_the_pipe(
        self, renderer: Renderer, size: int
    ) -> None:
        template = "{#" + "x" * (size - 100) + "#}" + PLAIN
        renderer.prepare(template)
        text = "é" * size
        assert render(renderer, template, [{"role": "user", "content": text}]) == text


class TestMessages:
    def test_messages_are_json(self, renderer: Renderer) -> None:
        content = [{"type": "image", "url": None}, 1, 2.5, True, "é\ud800\0"]
        messages = (MappingProxyType({"role": "user", "extra": UserList(content)}),)
        assert render(
            renderer,
            "{{ messages[0].extra == [{'type': 'image', 'url': none}, 1, 2.5, true, "
            "messages[0].extra[4]] }}",
            messages,
        )
        assert render(renderer, "{{ messages[0].extra[4] }}", messages) == "é\ud800\0"

    @pytest.mark.parametrize(
        "value",
        [b"x", object(), {1, 2}, float("nan"), np.ones(2), {("a",): 1}, [10**5000]],
        ids=type,
    )
    def test_messages_that_are_not_json(self, renderer: Renderer, value: Any) -> None:
        with pytest.raises(RequestError, match="a conversation must be JSON: "):
            render(renderer, messages=[{"role": "user", "content": value}])

    def test_messages_that_are_too_deep_or_too_long(
        self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        circle: list[Any] = []
        circle.append(circle)
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for value in (circle, deep):
            with pytest.raises(RequestError, match="a conversation must be JSON"):
                render(renderer, messages=[{"role": "user", "content": value}])
        monkeypatch.setattr(templates, "_MAX_REQUEST", 1000)
        with pytest.raises(
            RequestError, match=r"the conversation has 1,.* bytes, more than the limit of 1,000"
        ):
            render(renderer, messages=[{"role": "user", "content": "x" * 1000}])


class TestProcessEnds:
    def test_process_ends_after_close(self) -> None:
        before = children(), descriptors()
        for use in (lambda renderer: None, lambda renderer: renderer.prepare(PLAIN), render):
            renderer = Renderer()
            use(renderer)
            renderer.close()
            renderer.close()
            assert (children(), descriptors()) == before
            with pytest.raises(ClosedError):
                render(renderer)

    def test_process_ends_with_its_renderer(self) -> None:
        before = children(), descriptors()
        render(Renderer())
        assert (children(), descriptors()) == before

    def test_process_ends_with_its_model(
        self, write_gguf: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process starts before the tokenizer loads, and ends after close or a
        failed load.
        """
        path, before, load, seen = str(write_gguf()), children(), Checkpoint.load_tokenizer, []

        def noted(checkpoint: Checkpoint) -> Any:
            seen.append(children() - before)
            return load(checkpoint)

        monkeypatch.setattr(Checkpoint, "load_tokenizer", noted)
        with LLM(path, backend="reference", max_model_len=64, kv_blocks=8) as llm:
            assert children() - before == seen[0] and len(seen[0]) == 1
            assert llm._prompts.read(USER).text == "hello"
        assert children() == before
        monkeypatch.setattr(Checkpoint, "load_tokenizer", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLM(path)
        assert children() == before

    def test_process_ends_with_its_parent(self) -> None:
        code = (
            "import sys, time; from headrace.checkpoint.templates import Renderer; r = "
            "Renderer(); r.prepare('x'); "
        )
        code += "print(r._worker._process.pid, flush=True); time.sleep(60)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for number in (signal.SIGKILL, signal.SIGINT):
            with subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            ) as process:
                assert process.stdout
                pid = int(process.stdout.readline())
                process.send_signal(number)
            wait_for_the_end_of(pid)

    def test_process_ends_after_an_interruption(
        self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        render(renderer)
        pid = pid_of(renderer)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                render(renderer, ENDLESS)
        finally:
            signal.signal(signal.SIGALRM, previous)
        wait_for_the_end_of(pid)
        assert render(renderer) == "hello"


class TestThreadsAndForks:
    def test_many_threads(self, renderer: Renderer) -> None:
        def use(number: int) -> None:
            for i in range(50):
                content = f"{number} {i}"
                template = PLAIN if i % 2 else PLAIN + "!"
                rendered.append(
                    render(renderer, template, [{"role": "user", "content": content}]).rstrip("!")
                    == content
                )

        rendered: list[bool] = []
        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rendered == [True] * 200

    def test_closed_by_another_thread(self, renderer: Renderer) -> None:
        render(renderer)
        errors: list[BaseException] = []

        def use() -> None:
            try:
                render(renderer, ENDLESS)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        while renderer._worker and renderer._worker._template != ENDLESS:
            time.sleep(0.001)
        renderer.close()
        thread.join()
        assert [type(error) for error in errors] == [ClosedError]

    def test_a_fork_has_its_own_process(self, renderer: Renderer) -> None:
        """The child neither uses nor ends the parent's process, even if another thread
        held the lock.
        """
        render(renderer)
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with renderer._lock:
                held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if not (pid := os.fork()):
            try:
                right = render(renderer) == "hello"
                renderer.close()
                os._exit(0 if right else 1)
            except BaseException:
                os._exit(2)
        release.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        mine = pid_of(renderer)
        assert render(renderer) == "hello" and pid_of(renderer) == mine

    def test_a_killed_process_is_replaced(self, renderer: Renderer) -> None:
        render(renderer)
        before = children()
        os.kill(pid_of(renderer), signal.SIGKILL)
        os.waitid(os.P_PID, pid_of(renderer), os.WEXITED | os.WNOWAIT)
        assert render(renderer) == "hello"
        assert len(children()) == len(before) and len(children() - before) == 1

    def test_a_process_killed_while_rendering(self, renderer: Renderer) -> None:
        render(renderer)
        threading.Timer(0.05, os.kill, (pid_of(renderer), signal.SIGKILL)).start()
        with pytest.raises(
            RequestError, match="the chat template ended the process that renders it, with code -9"
        ):
            render(renderer, ENDLESS)

    def test_a_process_that_cannot_start(
        self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        renderer.prepare(PLAIN)
        with pytest.raises(RequestError, match="cannot start: No such file"):
            render(renderer)
        monkeypatch.undo()
        assert render(renderer) == "hello"
