"""Runs an engine in its own virtual environment, with a new process for each turn."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Timer
from typing import Any

from engines import ENGINES

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
WORKER = ROOT / "benchmarks" / "worker.py"
MAX_SECONDS = 1800
"""Timeout of a process."""


class Unavailable(Exception):
    """An engine cannot be measured here; the message has the reason."""


def interpreter(engine: str) -> str:
    """The Python interpreter of an engine, installed on first use. Raises Unavailable."""
    if not ENGINES[engine].pip:
        return sys.executable
    folder = BENCH / engine
    python = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        print(
            f"setting up {engine} in {folder.relative_to(ROOT)}, once: this can take "
            "minutes and gigabytes",
            file=sys.stderr,
        )
        commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        commands += [
            [python, "-m", "pip", "-q", *command.split()] for command in ENGINES[engine].pip
        ]
        for command in commands:
            result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
            if result.returncode:
                raise Unavailable(f"`{' '.join(command[2:])}`: {_last_line(result.stderr)}")
        (folder / "ready").touch()
    return python


def turn(python: str, engine: str, threads: int, words: list[str]) -> dict[str, Any]:
    """The results of one run of `worker.py`, and the seconds from its start to its first token.
    Raises Unavailable.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    if ENGINES[engine].pip:
        environment.pop("PYTHONPATH", None)  # a peer sees its own packages alone
    command = [python, str(WORKER), engine, *words, "--threads", str(threads)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        except OSError as error:
            raise Unavailable(f"{python}: {error.strerror}") from None
        watchdog = Timer(MAX_SECONDS, process.kill)
        watchdog.start()
        with process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                seconds = time.perf_counter() - start
                found = process.stdout.readline()
            except BaseException:  # Ctrl-C leaves nothing behind
                process.kill()
                raise
            finally:
                watchdog.cancel()
        if process.returncode == -signal.SIGKILL:
            raise Unavailable(
                f"killed: out of memory, or not done within {MAX_SECONDS // 60} minutes"
            )
        if not found:
            errors.seek(0)
            raise Unavailable(_last_line(errors.read()))
    return json.loads(found) | {"start": seconds}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it says nothing"
