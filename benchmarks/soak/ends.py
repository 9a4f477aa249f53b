"""SIGTERM and Ctrl-C under load: with time to finish, without time, and twice."""

import asyncio
import signal
import time
from collections.abc import Callable

from client import Answer, Body, ask
from harness import Findings, Running, children, is_alive, tiny_model, wait

_STREAMS = 12
_FLAGS = ("--threads", "1", "--kv-blocks", "2048", "--max-num-seqs", "16")


def run(findings: Findings) -> None:
    drained = _end(
        findings, "SIGTERM, 30 s to finish", (signal.SIGTERM,), 700, "--drain-seconds", "30"
    )
    findings.holds(
        all(one.is_whole and one.finish_reason == "length" for one in drained),
        f"{len(drained)} streams ended as they should",
    )
    for what, signals, drain in (
        ("SIGTERM, no time to finish", (signal.SIGTERM,), "0"),
        ("SIGTERM twice", (signal.SIGTERM, signal.SIGTERM), "600"),
        ("SIGINT twice", (signal.SIGINT, signal.SIGINT), "600"),
    ):
        cut = _end(findings, what, signals, 3500, "--drain-seconds", drain)
        right = sum(one.is_whole and one.error == "server_shutting_down" for one in cut)
        findings.holds(
            right == len(cut), f"{right} of {len(cut)} streams end with an event that says why"
        )


def _end(
    findings: Findings, what: str, signals: tuple[signal.Signals, ...], tokens: int, *flags: str
) -> list[Answer]:
    server = Running(tiny_model(), *_FLAGS, *flags)
    left = [*children(server.process.pid)]
    body: Body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def under_way() -> list[Answer]:
        tasks = [
            asyncio.ensure_future(ask(server.port, "/v1/completions", body))
            for _ in range(_STREAMS)
        ]
        await asyncio.to_thread(
            wait, lambda: server.figures()["headrace_sequences_running"] == _STREAMS, 30
        )
        await asyncio.to_thread(_signal, findings, server, signals, what)
        return list(await asyncio.gather(*tasks))

    begun = time.monotonic()
    answers = asyncio.run(under_way())
    code = server.stop()
    seconds = time.monotonic() - begun
    findings.holds(code == 0, f"{what}: exit code {code}")
    findings.says(f"{seconds:.1f} s from the first request to the end of the process")
    findings.holds(
        wait(lambda: not any(map(is_alive, left)), 2) is not None,
        f"none of its {len(left)} processes is left",
    )
    return answers


def _signal(
    findings: Findings, server: Running, signals: tuple[signal.Signals, ...], what: str
) -> None:
    for number in signals:
        server.process.send_signal(number)
        time.sleep(0.05 * (len(signals) > 1))
    begun = time.monotonic()
    if len(signals) == 1 and "30 s" in what:
        took = wait(lambda: server.get("/health/ready").status == 503, 5)
        findings.holds(
            took is not None and took <= 0.1,
            f"not ready {1000 * (took or 5):.0f} ms after the signal (at most 100)",
        )
        reply = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
        findings.holds(
            reply.status == 503 and reply.json["error"]["code"] == "server_shutting_down",
            f"a new request gets {reply.status}",
        )
        return
    took = wait(_ended(server), 30)
    findings.holds(
        took is not None and took <= 4,
        f"ended {took or 30:.1f} s after the signal (at most 4), "
        f"{time.monotonic() - begun:.1f} in all",
    )


def _ended(server: Running) -> Callable[[], bool]:
    return lambda: server.process.poll() is not None
