"""The command line: one file for each command, and helpers that they share.

`entry` is the console script. It handles Ctrl-C before it imports anything.
"""

import os


def entry() -> None:
    try:
        from headrace.cli.process import run_process
    except KeyboardInterrupt:
        os._exit(130)
    run_process()
