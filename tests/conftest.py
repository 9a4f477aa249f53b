"""Hooks of all tests."""

import gc
import os
import signal
from importlib.util import find_spec

import pytest

# Kernels for a GPU run in Triton's interpreter, unless they are to be tried on one.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup, or started in the background by a script, a process ignores these, and so would every
# process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept the options of pytest-timeout in pyproject.toml without it: `make test-cuda`."""
    if find_spec("pytest_timeout") is None:
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "an option of pytest-timeout, which is not installed")


def pytest_sessionfinish() -> None:
    """Unfreeze objects that command-line sessions froze; the native module would report them as
    leaks.
    """
    gc.unfreeze()
