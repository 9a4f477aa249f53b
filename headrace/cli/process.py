"""The process that runs one command line: its streams take any text, and its signals end it in
order.
"""

import gc
import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from headrace.cli import signals
from headrace.cli.main import fail, main

_GARBAGE = 100_000
"""New objects after which Python's collector looks for cycles among them."""


def run_process() -> NoReturn:
    """Run `main` with the arguments of this process, and exit with its code."""
    signals.raise_when_ended()
    _start_fast()
    had_stdout = sys.stdout is not None
    _open_streams()
    code = (
        main(sys.argv[1:])
        if had_stdout
        else fail("stdout is closed, and the output has no other place to go", 1)
    )
    signals.exit_when_ended()
    sys.exit(code)


def _start_fast() -> None:
    """Leave out what Python and NumPy do at each start for programs of other kinds."""
    # What modules and vocabularies allocate stays, and by default the collector goes through all of
    # it again and again.
    gc.set_threshold(_GARBAGE)
    # The threads of NumPy's BLAS would spin beside our own, from the import on: nothing is computed
    # with it but in tests.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _open_streams() -> None:
    """Give closed streams /dev/null: else the next file that is opened takes their number. No
    character is refused.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
