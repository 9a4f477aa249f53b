"""Chat templates: rendered in a process of their own (`template_worker.py`), which can be ended
when one takes too much.

The process imports the standard library and jinja2, and takes a tenth of a second to start. So it
is started when a model is opened, beside the loading of its weights, and nothing waits for it
before the first conversation.
"""

import errno
import json
import os
import reprlib
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

from headrace.errors import ClosedError, FormatError, RequestError

_SECONDS = 2
"""Of the processor, for one rendering."""
_PATIENCE = 60.0
"""Seconds on the clock: for a machine so busy, or a process so stopped, that the processor's do not
pass.
"""
_MEMORY = 512 << 20
_MAX_REQUEST = 64 << 20
_HEAD = 4
"""Bytes before each frame: its length, little endian."""
_CHUNK = 1 << 16

# Isolated (-I) and without site (-S) it starts fast and runs nothing that the environment names;
# modules are where this process has them.
_MAIN = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from headrace.checkpoint.template_worker import serve; serve(int(sys.argv[1]), "
    "int(sys.argv[2]))"
)


class Renderer:
    """Renders chat templates, one at a time, in a process that starts when it is needed. May be
    used from several threads.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._worker: _Worker | None = None
        self._owner = os.getpid()
        self._closed = False

    def prepare(self, template: str) -> None:
        """Have the template compiled, and wait for nothing; what is wrong with it is said when it
        is rendered.
        """
        with self._lock, suppress(RequestError):  # a process that cannot start is tried again then
            self._ready(template)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        bos: str,
        eos: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with `parse_special` and without
        `add_special`.

        `chat_template_kwargs` are further names for the template, such as `enable_thinking`. Raises
        FormatError for a template that is not valid or does what it must not; RequestError for
        messages that are no JSON or that the template cannot render, for output over 4 MB, and for
        a rendering that takes more than 2 s or 512 MB; ClosedError after `close`.
        """
        further = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(further, Mapping):
            raise RequestError(
                f"chat_template_kwargs must be a dictionary, not {type(further).__name__}"
            )
        names: dict[str, Any] = {
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": add_generation_prompt,
        }
        names |= {
            "messages": list(map(_with_reasoning, messages)),
            "tools": tools,
            "documents": documents,
        }
        for name in ("tools", "documents"):
            if names[name] is not None and not (
                isinstance(names[name], Sequence)
                and all(isinstance(one, Mapping) for one in names[name])
            ):
                raise RequestError(
                    f"{name} must be a list of dictionaries, not {reprlib.repr(names[name])}"
                )
        if not isinstance(add_generation_prompt, bool):
            raise RequestError(
                "add_generation_prompt must be true or false, not "
                f"{reprlib.repr(add_generation_prompt)}"
            )
        if taken := sorted(names.keys() & further.keys()):
            raise RequestError(f"chat_template_kwargs may not replace {', '.join(taken)}")
        request = _frame({"names": names | dict(further)})
        if len(request) > _MAX_REQUEST:
            raise RequestError(
                f"the conversation has {len(request):,} bytes, more than {_MAX_REQUEST:,}"
            )
        self._leave_parent()
        with self._lock:
            answer = self._exchange(template, request)
        if "text" in answer:
            return str(answer["text"])
        raise (FormatError if answer["blame"] == "template" else RequestError)(answer["message"])

    def close(self) -> None:
        """End the process; a rendering under way in another thread ends with ClosedError. May be
        called more than once.
        """
        self._closed = True
        self._leave_parent()
        if worker := self._worker:
            worker.kill()
        with self._lock:
            if worker := self._worker:
                self._worker = None
                worker.stop()

    def _leave_parent(self) -> None:
        """In a fork, begin anew: the process is the parent's, and a thread that held the lock is
        not here.
        """
        if self._owner != os.getpid():
            self._owner, self._lock, self._worker = os.getpid(), RLock(), None

    def _ready(self, template: str) -> "_Worker":
        """A process that knows the template, or is about to."""
        if self._closed:
            raise ClosedError("this model is closed")
        if self._worker is None or self._worker.has_ended():
            self._worker = _Worker()
        self._worker.use(template)
        return self._worker

    def _exchange(self, template: str, request: bytes) -> dict[str, Any]:
        worker = self._ready(template)
        try:
            raw = worker.exchange(request)
        except BaseException:  # an interruption, too, leaves it in the middle of something
            self._worker = None
            worker.stop()
            raise
        if raw is not None:
            answer: dict[str, Any] = json.loads(raw)
            return answer
        self._worker = None
        code = worker.stop()
        if self._closed:
            raise ClosedError("this model was closed while its chat template was rendered")
        ends = {
            errno.ENOMEM: f"took more than {_MEMORY >> 20} MB",
            -signal.SIGXCPU: f"took more than {_SECONDS} s",
        }
        raise RequestError(
            "the chat template "
            f"{ends.get(code, f'ended the process that renders it, with code {code}')}"
        )


class _Worker:
    """A process of `template_worker.py`."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _MAIN,
            str(_SECONDS),
            str(_MEMORY),
            *map(os.path.abspath, sys.path),
            root,
        ]
        pipes: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "bufsize": 0,
        }
        try:
            # A session of its own: Ctrl-C on the terminal is for us. It ends itself when its stdin
            # does.
            self._process = subprocess.Popen(command, **pipes, cwd="/", start_new_session=True)
        except OSError as error:
            raise RequestError(
                f"the process that renders chat templates cannot start: {error.strerror}"
            ) from error
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._unsent = bytearray()
        self._template: str | None = None
        self._stop = weakref.finalize(self, _stop, self._process, os.getpid())

    def use(self, template: str) -> None:
        """Send a template that it does not have yet, as far as the pipe takes it at once."""
        if template != self._template:
            self._template = template
            self._unsent += _frame({"template": template})
            self._send()

    def exchange(self, request: bytes) -> bytes | None:
        """The answer to a request; None where the process has ended. Raises RequestError when it
        takes too long.
        """
        self._unsent += request
        received, deadline, poll = bytearray(), time.monotonic() + _PATIENCE, select.poll()
        poll.register(self._stdout, select.POLLIN)
        while len(received) < _HEAD or len(received) < _HEAD + int.from_bytes(
            received[:_HEAD], "little"
        ):
            if self._unsent:
                poll.register(self._stdin, select.POLLOUT)
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise RequestError(f"the chat template took more than {_PATIENCE:g} s")
            if self._stdin in ready:
                self._send()
                poll.unregister(self._stdin)
            if self._stdout in ready:
                if not (chunk := os.read(self._stdout, _CHUNK)):
                    return None
                received += chunk
        return bytes(received[_HEAD:])

    def has_ended(self) -> bool:
        """Whether it was killed since its last answer."""
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int:
        """End it, and give back its memory and our ends of the pipes. Returns its exit code, 0
        where it had been stopped before.
        """
        return self._stop() or 0

    def _send(self) -> None:
        try:
            sent = os.write(self._stdin, self._unsent[:_CHUNK])
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:  # it has ended, which its stdout says
            sent = len(self._unsent)
        del self._unsent[:sent]


def _stop(process: "subprocess.Popen[bytes]", owner: int) -> int:
    """What `_Worker.stop` does; in a fork, to which the process does not belong, it only closes our
    ends.
    """
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    if owner != os.getpid():
        process.returncode = 0
    elif process.poll() is None:
        process.kill()
    return process.wait()


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning, if it has any, is under each of the names that templates read, as
    transformers has it.
    """
    given = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = next((text for text in given if text is not None), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _frame(content: dict[str, Any]) -> bytes:
    """A frame for the worker. Raises RequestError for what is not JSON."""
    try:
        raw = json.dumps(content, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a conversation must be JSON: {error}") from error
    return len(raw).to_bytes(_HEAD, "little") + raw


def _plain(value: object) -> object:
    """Dictionaries and lists of other types as such."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{type(value).__name__} is none of its types")
