"""The process that trains a drafter: its start, its messages and its end."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "headrace.distil.online")
_CHUNK = 1 << 16


class TrainerProcess:
    """Messages are JSON objects, one on a line, through its stdin and stdout. It ends with its
    stdin.
    """

    def __init__(self, setup: Mapping[str, Any], descriptor: int) -> None:
        """`descriptor` is of the buffer's memory. Raises OSError if no process can start."""
        python_path = os.pathsep.join(map(os.path.abspath, sys.path))
        self._process = subprocess.Popen(
            COMMAND,
            # Threads that wait must not take time from the engine, and no GPU is needed.
            env=os.environ
            | {
                "PYTHONPATH": python_path,
                "OMP_WAIT_POLICY": "PASSIVE",
                "CUDA_VISIBLE_DEVICES": "",
            },
            pass_fds=(descriptor,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # so Ctrl-C in the terminal reaches only this process
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._received = b""
        self.send(dict(setup) | {"descriptor": descriptor})

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting. If the process has ended, `receive` says so."""
        with suppress(BrokenPipeError, BlockingIOError, ValueError):
            self._stdin.write(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> list[dict[str, Any]] | None:
        """Return the messages that arrive within some seconds; None after the end."""
        if not select.select([self._stdout], [], [], seconds)[0]:
            return []
        if not (chunk := os.read(self._stdout.fileno(), _CHUNK)):
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Ask the process to end, without waiting."""
        with suppress(OSError):
            self._stdin.close()

    def end(self) -> int:
        """End the process, and return its exit status, which is negative after a signal."""
        self.close()
        try:
            return self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._stdout.close()
