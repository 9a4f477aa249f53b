"""20 starts whose load takes 90 s, under default flags: no healthy engine is killed."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Findings, Running, tiny_model

from tests.server import slow_engine

_STARTS = 20
_AT_ONCE = 10
_SECONDS = 90.0
_FLAGS = ("--threads", "1", "--kv-blocks", "64")


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    num_loading = num_well = 0
    complaints: list[str] = []
    for _ in range(_STARTS // _AT_ONCE):
        with TemporaryDirectory() as folder:
            gate = Path(folder) / "open"
            servers = [_start(gate) for _ in range(_AT_ONCE)]
            time.sleep(seconds)
            num_loading += sum(_status(server) == 503 for server in servers)
            gate.touch()
            for server in servers:
                server.ready.wait(60)
            time.sleep(2)  # the watch looks four times a second
            for server in servers:
                health = server.get("/health/ready")
                num_well += health.status == 200 and health.json["restarts"] == 0
                code = server.stop()
                words = ("no progress", "no heartbeat", "Traceback")
                complaints += [line for line in server.log if any(map(line.__contains__, words))]
                complaints += [f"exit code {code}"] * (code != 0)
    findings.holds(
        num_loading == _STARTS,
        f"{num_loading} of {_STARTS} respond with 503 after a load of {seconds:.0f} s",
    )
    findings.holds(num_well == _STARTS, f"{num_well} of {_STARTS} engines are ready and kept")
    findings.holds(not complaints, f"no complaint in the logs {complaints[:3] or ''}")


def _start(gate: Path) -> Running:
    return Running(
        tiny_model(),
        *_FLAGS,
        env={slow_engine.VARIABLE: str(gate)},
        program="tests.server.slow_engine",
        waits=False,
    )


def _status(server: Running) -> int:
    return server.get("/health/ready").status
