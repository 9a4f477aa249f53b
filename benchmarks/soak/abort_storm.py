"""2,000 streams, each closed by its client after 0 to 50 chunks, also in queue and prefill."""

import asyncio
import random

from client import ask
from harness import Findings, check_rest, serving, tiny_model

_REQUESTS = 2000
_AT_ONCE = 48


def run(findings: Findings) -> None:
    flags = ("--threads", "1", "--kv-blocks", "512", "--max-num-seqs", "16", "--max-waiting", "64")
    with serving(findings, tiny_model(), *flags) as server:
        statuses = asyncio.run(_storm(server.port))
        findings.holds(
            set(statuses) <= {0, 200},
            f"{len(statuses):,} closed; statuses that were seen: {sorted(set(statuses) - {0})}",
        )
        check_rest(findings, server, 2)
        findings.holds(
            server.get("/health").json["restarts"] == 0, "the engine was never started again"
        )


async def _storm(port: int) -> list[int]:
    rng, places = random.Random(0), asyncio.Semaphore(_AT_ONCE)

    async def one() -> int:
        prompt = "".join(rng.choices("abcdefgh ", k=rng.choice((10, 40, 900))))
        body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with places:
            return (await ask(port, "/v1/completions", body, pieces=rng.randint(0, 50))).status

    return await asyncio.gather(*(one() for _ in range(_REQUESTS)))
