"""The process that runs one command line: its streams take any text, and its signals end it in order."""

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from headrace.cli import signals
from headrace.cli.main import fail, main


def run_process() -> NoReturn:
    """Run `main` with the arguments of this process, and exit with its code."""
    signals.raise_when_ended()
    had_stdout = sys.stdout is not None
    _open_streams()
    code = main(sys.argv[1:]) if had_stdout else fail("stdout is closed, and the output has no other place to go", 1)
    signals.exit_when_ended()
    sys.exit(code)


def _open_streams() -> None:
    """Give closed streams /dev/null: else the next file that is opened takes their number. No character is refused."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
