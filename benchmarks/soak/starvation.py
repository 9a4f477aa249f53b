"""A prompt of 6,000 tokens next to 8 streams and a short request: their delays, without a
criterion.
"""

import asyncio
import random

from client import Answer, Body, ask
from harness import Findings, check_rest, percentile, serving

_LONG = 6000


def run(findings: Findings) -> None:
    with serving(findings, "smollm2", "--max-num-seqs", "16") as server:
        asyncio.run(ask(server.port, "/v1/completions", {"prompt": "hello", "max_tokens": 8}))
        before, while_read, long, short = asyncio.run(_all(server.port))
        ratio = percentile(while_read, 99) / max(percentile(before, 99), 1e-9)
        for name, gaps in (("before", before), ("while it is read", while_read)):
            shown = (
                f"p50 {1000 * percentile(gaps, 50):.0f} ms, p99 "
                f"{1000 * percentile(gaps, 99):.0f} ms"
            )
            findings.says(f"between tokens {name}: {shown}, {len(gaps)} gaps")
        findings.says(f"p99 is {ratio:.1f} times as long (the aim is 4)")
        findings.says(
            f"first token of the long prompt after {long.first:.1f} s, of 16 tokens "
            f"beside it after {short.first:.2f} s"
        )
        findings.holds(long.is_whole and short.is_whole and bool(while_read), "all were answered")
        check_rest(findings, server, 2)


async def _all(port: int) -> tuple[list[float], list[float], Answer, Answer]:
    rng = random.Random(0)

    def body(prompt: int, length: int) -> Body:
        ids = [rng.randint(1000, 40000) for _ in range(prompt)]
        return {
            "prompt": ids,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    streams = [
        asyncio.ensure_future(ask(port, "/v1/completions", body(16, 4000))) for _ in range(8)
    ]
    await asyncio.sleep(8)
    long_task = asyncio.ensure_future(ask(port, "/v1/completions", body(_LONG, 4)))
    await asyncio.sleep(1)
    short = await ask(port, "/v1/completions", body(16, 4))
    long = await long_task
    for stream in streams:
        stream.cancel()
    answers = await asyncio.gather(*streams)
    first = long.begun + long.first
    before = [
        gap
        for one in answers
        for at, gap in zip(one.times[1:], one.gaps, strict=True)
        if long.begun - 6 < at <= long.begun
    ]
    while_read = [
        gap
        for one in answers
        for at, gap in zip(one.times[1:], one.gaps, strict=True)
        if long.begun < at <= first
    ]
    return before, while_read, long, short
