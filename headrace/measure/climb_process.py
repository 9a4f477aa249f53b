"""Runs one rung in a process of its own, so that its peak memory is its own.

The process reads a task as JSON and writes lines of JSON: shares, then the result or an error. It
ends with its parent.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from headrace.errors import HeadraceError, MemoryLimitError
from headrace.measure.climb_run import Measured, ShareCallback, Task, Text, run_task

_PR_SET_PDEATHSIG = 1
_REPORT_SECONDS = 0.25
_MODULE = "headrace.measure.climb_process"


def run_apart(task: Task, on_share: ShareCallback) -> Measured:
    """Run a rung in another process. Raises HeadraceError, MemoryLimitError if it was killed."""
    with _started() as process:
        try:
            assert process.stdin and process.stdout
            # A process that ends at once has closed the pipe; its code says why.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(_facts(task)))
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "share" in message:
                    on_share(message["share"])
                elif "error" in message:
                    kind = MemoryLimitError if message["is_memory"] else HeadraceError
                    raise kind(message["error"])
                else:
                    return Measured(**message)
            code = process.wait()
        finally:
            process.kill()
    if code == -signal.SIGKILL:
        raise MemoryLimitError("the system killed the process, as it does if memory is short")
    raise HeadraceError(f"the process ended with code {code} and no result")


def run_command(*command: str) -> None:
    """Run a `headrace` command. Raises HeadraceError with its message."""
    with _started(*command, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate()
        finally:
            process.kill()
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise HeadraceError(lines[-1].removeprefix("headrace: "))


def _started(*command: str, stderr: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
    # The process imports from the paths of this one, and never from the working directory, which
    # may be a checkout of another version.
    python_path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), *command],
        env=os.environ | {"PYTHONPATH": python_path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,  # so Ctrl-C in the terminal reaches only this process
    )


def _facts(task: Task) -> dict[str, Any]:
    return vars(task) | {"text": vars(task.text) if task.text else None}


def _put(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class _Reporter:
    """Writes shares now and then: the parent would take a core for each line."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, share: float) -> None:
        if share >= 1 or time.monotonic() >= self._next:
            _put({"share": share})
            self._next = time.monotonic() + _REPORT_SECONDS


def main(parent: str, *command: str) -> NoReturn:
    """Run the task on stdin, or a `headrace` command; both end with the parent."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before prctl
        sys.exit(1)
    if command:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "headrace", *command])
    facts = json.load(sys.stdin)
    text = facts.pop("text")
    task = Task(**facts, text=Text(**text) if text else None)
    try:
        _put(vars(run_task(task, _Reporter())))
    except HeadraceError as error:
        _put({"error": str(error), "is_memory": isinstance(error, MemoryLimitError)})
    except MemoryError:
        _put({"error": "out of memory", "is_memory": True})
    except Exception as error:
        _put({"error": f"{type(error).__name__}: {error}", "is_memory": False})
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
