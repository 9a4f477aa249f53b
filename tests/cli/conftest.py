import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEADRACE = [sys.executable, "-m", "headrace"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def headrace() -> Run:
    """Runs `headrace WORDS...` in a process of its own, without a terminal."""

    def run(*words: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        feed = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*HEADRACE, *words],
            **feed,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real default model, fetched on first use."""
    from headrace.checkpoint.source import resolve

    return resolve("smollm2", progress=False)
