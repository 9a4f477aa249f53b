"""Three times the sustainable load for a minute: excess requests are refused at once, and the
others are not slowed down.
"""

import asyncio
import random
import time

from client import Answer, Body, ask
from harness import Findings, Running, check_rest, percentile, serving, tiny_model, wait

_SECONDS = 60.0
_SATURATION_SECONDS = 20.0
_RUNNING, _WAITING = 8, 16


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    flags = (
        "--threads",
        "1",
        "--max-num-seqs",
        str(_RUNNING),
        "--max-waiting",
        str(_WAITING),
        "--kv-blocks",
        "512",
    )
    with serving(findings, tiny_model(), *flags) as server:
        asyncio.run(_closed(server.port, 3))
        rates = [asyncio.run(_closed(server.port, _SATURATION_SECONDS))]
        answers, waiting = asyncio.run(_open(server, 3 * rates[0], seconds))
        took = wait(lambda: server.get("/health/ready").status == 200 and server.at_rest(), 30)
        rates.append(asyncio.run(_closed(server.port, _SATURATION_SECONDS)))
        served = [one for one in answers if one.status == 200 and one.is_whole and not one.error]
        refused = [one for one in answers if one.status == 503]
        findings.holds(
            len(served) + len(refused) == len(answers),
            f"{len(answers):,} asked, {len(served):,} served, {len(refused):,} refused, none else",
        )
        findings.holds(waiting <= _WAITING, f"at most {waiting:.0f} waited (at most {_WAITING})")
        findings.holds(
            all(
                "retry-after" in one.headers and one.error == "server_overloaded" for one in refused
            ),
            "each refusal says when to come again",
        )
        times = [1000 * one.seconds for one in refused]
        shown = (
            f"p50 {percentile(times, 50):.1f} ms (at most 50), p99 "
            f"{percentile(times, 99):.0f}, with the client on the same cores"
        )
        findings.holds(bool(refused) and percentile(times, 50) <= 50, f"refused after {shown}")
        goodput, saturation = (
            len(served) / max(one.begun + one.seconds - answers[0].begun for one in served),
            sum(rates) / 2,
        )
        shown = (
            f"{goodput:.2f} requests/s served, {rates[0]:.2f} before and {rates[1]:.2f} after "
            "as fast as they are answered"
        )
        findings.holds(
            goodput >= 0.9 * saturation, f"{shown}: {goodput / saturation:.0%} (at least 90 %)"
        )
        findings.holds(
            took is not None and took <= 5,
            f"at rest and ready {took or 30:.1f} s after the last answer (at most 5)",
        )
        check_rest(findings, server, 2)


def _body(rng: random.Random) -> Body:
    return {
        "prompt": [rng.randint(3, 250) for _ in range(32)],
        "max_tokens": 1000,
        "ignore_eos": True,
    }


async def _closed(port: int, seconds: float) -> float:
    """Requests per second of closed-loop clients, a few more than concurrent sequences."""
    rng, begun, ended = random.Random(1), time.monotonic(), 0

    async def client() -> None:
        nonlocal ended
        while time.monotonic() - begun < seconds:
            answer = await ask(port, "/v1/completions", _body(rng))
            ended += answer.is_whole

    await asyncio.gather(*(client() for _ in range(_RUNNING + 4)))
    return ended / (time.monotonic() - begun)


async def _open(server: Running, rate: float, seconds: float) -> tuple[list[Answer], float]:
    """Send requests at random moments; return the responses and the max number of waiting ones."""
    rng, begun, tasks, waiting = random.Random(2), time.monotonic(), [], 0.0
    next_at, look = begun, begun
    while (now := time.monotonic()) - begun < seconds:
        if now >= look:
            figures = await asyncio.to_thread(server.figures)
            waiting, look = max(waiting, figures["headrace_sequences_waiting"]), now + 0.5
        while next_at <= now:
            tasks.append(asyncio.ensure_future(ask(server.port, "/v1/completions", _body(rng))))
            next_at += rng.expovariate(rate)
        await asyncio.sleep(max(0.001, min(next_at - time.monotonic(), 0.05)))
    return await asyncio.gather(*tasks), waiting
