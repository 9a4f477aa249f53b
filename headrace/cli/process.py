"""The process of one command line: its streams accept any text, and its signals end it in order."""

import gc
import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from headrace.cli import signals
from headrace.cli.main import fail, main

_GC_THRESHOLD = 100_000


def run_process() -> NoReturn:
    signals.raise_on_signal()
    _start_fast()
    has_stdout = sys.stdout is not None
    _open_streams()
    if has_stdout:
        code = main(sys.argv[1:])
    else:
        code = fail("stdout is closed, and the output needs it; redirect it to a file", 1)
    signals.exit_on_signal()
    sys.exit(code)


def _start_fast() -> None:
    # Objects of modules and vocabularies stay, and by default the collector visits them often.
    gc.set_threshold(_GC_THRESHOLD)
    # The BLAS threads of NumPy would spin next to our own; only tests compute with NumPy's BLAS.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _open_streams() -> None:
    """Open closed streams on /dev/null, so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
