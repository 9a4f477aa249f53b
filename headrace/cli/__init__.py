"""The command line. `entry` is the console script; it answers Ctrl-C before it has imported
anything.
"""

import os


def entry() -> None:
    """Run the command line that this process was started with, and exit with its code."""
    try:
        from headrace.cli.process import run_process
    except KeyboardInterrupt:
        os._exit(130)
    run_process()
