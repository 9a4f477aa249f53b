"""Renders chat templates in a process that can be killed."""

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
from typing import Any, NamedTuple

from headrace.checkpoint.named_tokens import NamedTokens
from headrace.errors import ClosedError, FormatError, RequestError

_SECONDS = 2
_PATIENCE = 60.0
"""Seconds of a rendering on a busy machine."""
_MEMORY = 512 << 20
_MAX_REQUEST = 64 << 20
_HEAD = 4
"""Bytes of a frame's length, little endian."""
_CHUNK = 1 << 16

# Isolated (-I) and without site (-S), the process starts fast and ignores the environment. It
# finds modules in this process's places.
_MAIN = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from headrace.checkpoint.template_worker import serve; serve(int(sys.argv[1]), "
    "int(sys.argv[2]))"
)


class Rendering(NamedTuple):
    """A rendered conversation. Spans are start and end of characters."""

    text: str
    inserted: Sequence[Sequence[int]] = ()
    """Spans of messages, tools, documents and other values of the caller."""
    unknown: Sequence[Sequence[int]] = ()
    """Spans that the template made of values or of its own text."""
    end: int | None = None
    """End of the last message's content, if the template copies it."""
    notes: Sequence[str] = ()
    """Changes of the messages for this template, for the log."""


class Renderer:
    """Renders one template at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._worker: _Worker | None = None
        self._owner = os.getpid()
        self._closed = False

    def prepare(self, template: str) -> None:
        # Rendering tries again if the process cannot start.
        with self._lock, suppress(RequestError):
            self._ready(template)

    def check(self, template: str) -> None:
        """Raise FormatError for a malformed or forbidden template."""
        # Many templates refuse an empty conversation.
        with suppress(RequestError):
            self.render(template, [], named_tokens={})

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        named_tokens: NamedTokens,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        traces: bool = False,
        continues: bool = False,
        places: Sequence[str] | None = None,
        describes_tools: bool = False,
    ) -> Rendering:
        """Render a conversation; encode it without `add_special`.

        `named_tokens` are the tokenizer's, such as `bos_token`. `chat_template_kwargs`
        are further names, such as `enable_thinking`. `traces` asks for the origins of
        characters, `continues` for the end of the last message's content. `places`
        names the messages in errors. With `describes_tools`, a system message describes
        the tools if the template knows none. Raises
        FormatError for a malformed or forbidden template, ClosedError, and RequestError
        for refused messages and above 4 MB, 2 s or 512 MB.
        """
        more_names = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(more_names, Mapping):
            raise RequestError(
                f"chat_template_kwargs must be a dictionary, not {type(more_names).__name__}"
            )
        names: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
        }
        for name in ("tools", "documents"):
            value = names[name]
            if value is not None and not (
                isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value)
            ):
                raise RequestError(
                    f"{name} must be a list of dictionaries, not {reprlib.repr(value)}"
                )
        if not isinstance(add_generation_prompt, bool):
            raise RequestError(
                "add_generation_prompt must be true or false, not "
                f"{reprlib.repr(add_generation_prompt)}"
            )
        reserved_names = names.keys() | {"bos_token", "eos_token"}
        if reserved := sorted(reserved_names & more_names.keys()):
            raise RequestError(
                f"chat_template_kwargs may not replace {', '.join(reserved)}; leave them out"
            )

        request = _frame(
            {
                "tokens": dict(named_tokens),
                "names": names | dict(more_names),
                "traces": traces or continues,
                "continues": continues,
                "describes_tools": describes_tools,
                "places": places or [f"messages[{i}]" for i in range(len(messages))],
            }
        )
        if len(request) > _MAX_REQUEST:
            raise RequestError(
                f"the conversation has {len(request):,} bytes, more than the limit of "
                f"{_MAX_REQUEST:,}; shorten the conversation"
            )
        self._leave_parent()
        with self._lock:
            response = self._exchange(template, request)
        if "text" in response:
            return Rendering(**response)
        error = FormatError if response["blame"] == "template" else RequestError
        raise error(response["message"])

    def close(self) -> None:
        """A rendering in another thread ends with ClosedError."""
        self._closed = True
        self._leave_parent()
        if worker := self._worker:
            worker.kill()
        with self._lock:
            if worker := self._worker:
                self._worker = None
                worker.stop()

    def _leave_parent(self) -> None:
        if self._owner != os.getpid():
            self._owner, self._lock, self._worker = os.getpid(), RLock(), None

    def _ready(self, template: str) -> "_Worker":
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
        except BaseException:
            # An interruption leaves the process in the middle of a frame.
            self._worker = None
            worker.stop()
            raise
        if raw is not None:
            response: dict[str, Any] = json.loads(raw)
            return response

        self._worker = None
        code = worker.stop()
        if self._closed:
            raise ClosedError("this model was closed while its chat template was rendered")
        reasons = {
            errno.ENOMEM: f"took more than {_MEMORY >> 20} MB",
            -signal.SIGXCPU: f"took more than {_SECONDS} s",
        }
        reason = reasons.get(code, f"ended the process that renders it, with code {code}")
        raise RequestError(
            f"the chat template {reason}; shorten the conversation, or choose a simpler template"
        )


class _Worker:
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
        try:
            # In a session of its own, the process gets no Ctrl-C from the terminal. It ends when
            # its stdin ends.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
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
        if template != self._template:
            self._template = template
            self._unsent += _frame({"template": template})
            self._send()

    def exchange(self, request: bytes) -> bytes | None:
        """None if the process has ended. Raises RequestError after `_PATIENCE`."""
        self._unsent += request
        received, deadline, poll = bytearray(), time.monotonic() + _PATIENCE, select.poll()
        poll.register(self._stdout, select.POLLIN)
        while not _is_complete(received):
            if self._unsent:
                poll.register(self._stdin, select.POLLOUT)
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise RequestError(
                    f"the chat template took more than {_PATIENCE:g} s; try again when the "
                    "machine is less busy, or shorten the conversation"
                )
            if self._stdin in ready:
                self._send()
                poll.unregister(self._stdin)
            if self._stdout in ready:
                if not (chunk := os.read(self._stdout, _CHUNK)):
                    return None
                received += chunk
        return bytes(received[_HEAD:])

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int:
        return self._stop() or 0

    def _send(self) -> None:
        try:
            sent = os.write(self._stdin, self._unsent[:_CHUNK])
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:
            # The process has ended; its stdout says so.
            sent = len(self._unsent)
        del self._unsent[:sent]


def _is_complete(frame: bytearray) -> bool:
    size = int.from_bytes(frame[:_HEAD], "little")
    return len(frame) >= _HEAD and len(frame) >= _HEAD + size


def _stop(process: "subprocess.Popen[bytes]", owner: int) -> int:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    if owner != os.getpid():
        process.returncode = 0
    elif process.poll() is None:
        process.kill()
    return process.wait()


def _frame(content: dict[str, Any]) -> bytes:
    try:
        raw = json.dumps(content, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a conversation must be JSON: {error}") from error
    return len(raw).to_bytes(_HEAD, "little") + raw


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")
