"""The server with an engine that loads until a file exists: `python -m tests.server.slow_engine
serve ...`, with the name of the file in `LOADS_UNTIL`.
"""

import os
import sys
import time

VARIABLE = "LOADS_UNTIL"


def serve() -> None:
    """Run the API process."""
    from headrace.cli import entry
    from headrace.remote import start

    start.COMMAND = (sys.executable, "-m", "tests.server.slow_engine")
    entry()


def engine() -> None:
    """Run the engine process, whose heartbeat is late."""
    from headrace.remote import process

    load = process.open_engine
    process._BEAT_SECONDS = 0.5

    def load_later(*arguments: object) -> object:
        while not os.path.exists(os.environ[VARIABLE]):
            time.sleep(0.01)
        return load(*arguments)  # type: ignore[arg-type]

    process.open_engine = load_later  # type: ignore[assignment]
    process.main(*sys.argv[1:])


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else engine()
