"""kill -9 of the engine process with 20 streams: each client gets an error, and a new engine serves
the next request.
"""

import asyncio
import os
import signal
import time

from client import Answer, Body, ask
from harness import Findings, check_rest, is_alive, serving, tiny_model, wait

_STREAMS = 20


def run(findings: Findings) -> None:
    flags = ("--threads", "1", "--kv-blocks", "2048", "--max-num-seqs", "12", "--max-waiting", "16")
    with serving(findings, tiny_model(), *flags) as server:
        canary: Body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        alone = asyncio.run(ask(server.port, "/v1/completions", canary)).text
        first = server.engine_pid
        answers, killed = asyncio.run(_streams(server.port, lambda: os.kill(first, signal.SIGKILL)))
        heard = sum(one.error == "engine_dead" or one.status == 503 for one in answers)
        latest = max(one.begun + one.seconds - killed for one in answers)
        findings.holds(
            heard == _STREAMS and latest <= 2,
            f"{heard} of {_STREAMS} clients hear of it, the last after {latest:.2f} s (at most 2)",
        )
        took = wait(lambda: server.get("/health/ready").status == 200, 30)
        findings.holds(
            took is not None, f"ready again {(took or 30) + latest:.1f} s after the kill"
        )
        again = asyncio.run(ask(server.port, "/v1/completions", canary)).text
        findings.holds(again == alone != "", "the next request is answered as before")
        health = server.get("/health").json
        findings.holds(
            health["restarts"] == 1 and not is_alive(first) and server.engine_pid != first,
            f"{health['restarts']} restart, no process left",
        )
        check_rest(findings, server, 2)


async def _streams(port: int, kill: object) -> tuple[list[Answer], float]:
    body: Body = {"prompt": "hello", "max_tokens": 3500, "ignore_eos": True, "stream": True}
    tasks = [
        asyncio.ensure_future(ask(port, "/v1/completions", body, seconds=30))
        for _ in range(_STREAMS)
    ]
    await asyncio.sleep(0.4)
    kill()  # type: ignore[operator]
    killed = time.monotonic()
    return list(await asyncio.gather(*tasks)), killed
