"""SIGSTOP of the engine process, as if it hung: not ready, then restarted; live all the time."""

import asyncio
import os
import signal
import time

from client import Answer, Body, ask
from harness import Findings, Running, check_rest, serving, tiny_model, wait

_STREAMS = 8


def run(findings: Findings) -> None:
    flags = ("--threads", "1", "--kv-blocks", "2048", "--max-num-seqs", "12")
    with serving(findings, tiny_model(), *flags) as server:
        answers, begun = asyncio.run(_all(findings, server))
        heard = sum(one.error == "engine_dead" for one in answers)
        latest = max(one.begun + one.seconds - begun for one in answers)
        findings.holds(
            heard == _STREAMS,
            f"{heard} of {_STREAMS} clients hear of it, the last {latest:.1f} s after the stop",
        )
        took = wait(lambda: server.get("/health/ready").status == 200, 30)
        findings.holds(
            took is not None, f"ready again {latest + (took or 30):.1f} s after the stop"
        )
        reply = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
        findings.holds(
            reply.status == 200 and server.get("/health").json["restarts"] == 1,
            "the next request is answered, after 1 restart",
        )
        check_rest(findings, server, 2)


async def _all(findings: Findings, server: Running) -> tuple[list[Answer], float]:
    body: Body = {"prompt": "hello", "max_tokens": 3500, "ignore_eos": True, "stream": True}
    tasks = [
        asyncio.ensure_future(ask(server.port, "/v1/completions", body, seconds=60))
        for _ in range(_STREAMS)
    ]
    await asyncio.sleep(0.3)
    os.kill(server.engine_pid, signal.SIGSTOP)
    begun = time.monotonic()
    took = await asyncio.to_thread(wait, lambda: server.get("/health/ready").status == 503, 10)
    findings.holds(
        took is not None and took <= 3,
        f"not ready after {took or 10:.1f} s (2, and at most 1 more)",
    )
    findings.holds(server.get("/health/live").status == 200, "live all the same")
    return list(await asyncio.gather(*tasks)), begun
