"""Runs a row of the table of invocations, in this process or in its own."""

import ctypes
import fcntl
import io
import os
import pty
import re
import resource
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HEADRACE = [sys.executable, "-m", "headrace"]
MARKED = [
    sys.executable,
    "-c",
    "import os; from headrace.cli import entry; os.write(1, b'.'); entry()",
]
"""The command with a mark on stdout after the start of the interpreter.
"""
CODES = {0, 1, 2, 3, 4, 129, 130, 143}
"""All exit codes that the documentation names."""
_PROMPT = b"> "
_SECONDS = 150
"""A row that takes longer hangs."""


class Row(NamedTuple):
    """A command line, its conditions and the expected result, with names such as `{model}` to fill
    in.
    """

    words: str
    """Arguments of `headrace`, as a shell would read them."""
    code: int
    err: str = ""
    """Pattern of the only line on stderr; empty: there is none."""
    out: str = ""
    """Pattern that stdout has, where it is read."""
    stdin: str | None = None
    """Text that is piped in; None: /dev/null; `closed`: the shell's `<&-`."""
    stdout: str = ""
    """`closed`: `>&-`; `full`: /dev/full; `gone`: a pipe whose reader has left."""
    stderr: str = ""
    """`closed` or `full`, as stdout."""
    env: Mapping[str, str] = {}
    terminal: tuple[int, int] | None = None
    """Columns and lines of a terminal that is stdin, stdout and stderr; each line of `stdin` is
    typed at a prompt.
    """
    limits: Mapping[str, int] = {}
    """Of the system, such as `FSIZE`: bytes of the largest file that may be written."""
    read_only: str = ""
    """A folder that is made before, and may not be written to, not by root either."""
    signal: str = ""
    """`INT`, `TERM` or `HUP`, sent when the first output is there."""
    short: bool | None = None
    """Whether every run of the tests has it, and not `make cli` alone; None: if it needs no process
    of its own.
    """

    @property
    def is_short(self) -> bool:
        """Whether every run of the tests has it."""
        return not self.needs_process if self.short is None else self.short

    @property
    def needs_process(self) -> bool:
        """Whether there is a condition that only a process of its own can have."""
        return bool(
            self.stdin
            or self.stdout
            or self.stderr
            or self.terminal
            or self.limits
            or self.read_only
            or self.signal
        )


class Outcome(NamedTuple):
    """The result of a row; a text is None if it could not be read."""

    code: int
    out: str | None
    err: str | None


def filled(row: Row, places: Mapping[str, object]) -> Row:
    """The row with all `{names}` filled in."""

    def fill(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: str(places[match[1]]), text)

    env = {name: fill(value) for name, value in row.env.items()}
    return row._replace(
        words=fill(row.words), read_only=fill(row.read_only), env=env, err=fill(row.err)
    )


def faults(row: Row, outcome: Outcome) -> list[str]:
    """Differences from the row, and from the rules for every invocation."""
    said = []
    text = (outcome.out or "") + (outcome.err or "")
    said += [
        f"it says {words!r}"
        for words in ("Traceback", "Exception ignored", "internal error")
        if words in text
    ]
    if outcome.code != row.code or outcome.code not in CODES:
        said.append(f"exit code {outcome.code}, not {row.code}")
    if outcome.err is not None:
        lines = [
            line for line in outcome.err.splitlines() if not line.startswith("downloading ")
        ]  # which may take long
        if len(lines) != bool(row.err) or not re.search(row.err, "".join(lines)):
            said.append(f"stderr {outcome.err[-600:]!r}, not a line with {row.err!r}")
    if row.out and outcome.out is not None and not re.search(row.out, outcome.out):
        said.append(f"stdout {outcome.out[-600:]!r}, not {row.out!r}")
    return said


def run_here(row: Row, monkeypatch: Any, capture: Any) -> Outcome:
    """Call `main` in this process."""
    from headrace.cli.main import main

    with monkeypatch.context() as patch:
        for name, value in row.env.items():
            patch.setenv(name, value)
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        patch.setattr("headrace.cli.engine_records._MAX_WAIT", 0.1)
        code = main(shlex.split(row.words))
    return Outcome(code, *capture.readouterr())


def run_apart(row: Row, command: Sequence[str] = HEADRACE, delay: float = 0) -> Outcome:
    """Run the row in a process that `command` starts.

    Its signal is sent `delay` seconds after the first output.
    """
    if row.read_only:
        Path(row.read_only).mkdir(parents=True, exist_ok=True)
        Path(row.read_only).chmod(0o555)
    if row.terminal:
        return _run_on_terminal(row)
    streams: dict[str, Any] = {
        "stdin": subprocess.DEVNULL if row.stdin in (None, "closed") else subprocess.PIPE
    }
    with open("/dev/full", "wb") as full:
        streams |= {
            name: full if getattr(row, name) == "full" else subprocess.PIPE
            for name in ("stdout", "stderr")
        }
        process = subprocess.Popen(
            [*command, *shlex.split(row.words)],
            **streams,
            env=_environment(row),
            preexec_fn=_conditions(row),
        )
    if row.stdout == "gone":
        process.stdout.close()
        process.stdout = None
    try:
        first = b""
        if row.signal:
            assert select.select([process.stdout], [], [], _SECONDS)[0], "there is no output"
            first = process.stdout.read(1)
            time.sleep(delay)
            process.send_signal(getattr(signal, f"SIG{row.signal}"))
        out, err = process.communicate(
            row.stdin.encode() if streams["stdin"] == subprocess.PIPE else None, timeout=_SECONDS
        )
    finally:
        process.kill()
        process.wait()
    return Outcome(process.returncode, _text(out, first), _text(err))


def _run_on_terminal(row: Row) -> Outcome:
    master, slave = pty.openpty()
    columns, lines = row.terminal
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [*HEADRACE, *shlex.split(row.words)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=_environment(row),
        start_new_session=True,
        preexec_fn=_conditions(row),
    )
    os.close(slave)
    seen, typed, deadline = (
        b"",
        list(map(str.encode, (row.stdin or "").splitlines(keepends=True))),
        time.monotonic() + _SECONDS,
    )
    num_typed = 0
    try:
        while select.select([master], [], [], max(0, deadline - time.monotonic()))[0]:
            try:
                seen += os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if num_typed < len(typed) and seen.count(_PROMPT) > num_typed:
                os.write(master, typed[num_typed])
                num_typed += 1
            if row.signal:
                process.send_signal(getattr(signal, f"SIG{row.signal}"))
                row = row._replace(signal="")
        process.wait(max(0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return Outcome(process.returncode, seen.decode(errors="replace"), None)


def _environment(row: Row) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    } | dict(row.env)


def _conditions(row: Row) -> Callable[[], None]:
    """Set up the conditions of a row, between fork and exec."""

    def ready() -> None:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(row, name) == "closed":
                os.close(number)
        for name, most in row.limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        if (
            row.read_only
        ):  # root ignores permissions by two capabilities; the program must not have them
            for capability in (1, 2):
                _LIBC.prctl(24, capability, 0, 0, 0)

    return ready


_LIBC = ctypes.CDLL(None)


def _text(data: bytes | None, first: bytes = b"") -> str | None:
    return None if data is None else (first + data).decode(errors="replace")
