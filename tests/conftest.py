"""What all tests start from."""

import gc
import os
import signal

# Kernels for a GPU run in Triton's interpreter, unless they are to be tried on one.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup, or started in the background by a script, a process ignores these, and so would every
# process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionfinish() -> None:
    """Let the collector have what sessions of the command line froze, which would count as leaks of
    the native module.
    """
    gc.unfreeze()
