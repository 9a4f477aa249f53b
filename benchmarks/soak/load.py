"""64 concurrent streams, a fifth of them closed by clients at a random moment: no leaks, and no
mixed-up outputs.

The default model computes each greedy output alone first. All outputs under load must be equal to
it.
"""

import asyncio
import random
import time

from client import Answer, Body, ask, fill
from harness import Findings, Watch, check_rest, check_steady, serving

_STREAMS = 64
_SECONDS = 180.0
_LEAVE = 0.2
_BLOCKS = 384
_THINGS = (
    "wheel granite lighthouse bread glacier violin beehive compass engine tree tide loom "
    "sundial canal owl salt"
).split()
_ASKS = (
    "Explain what a {} is.",
    "Write a rhyme about a {}.",
    "List facts about a {}.",
    "A story: once a {}" + " and a bridge" * 90,
)


def canaries() -> list[tuple[str, Body]]:
    """Requests with different prompts, most of them short, some with several prefill steps."""
    found: list[tuple[str, Body]] = []
    for i in range(_STREAMS):
        text, length = _ASKS[i % 4].format(_THINGS[i // 4]), 24 + 7 * i % 64
        terms: Body = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
        if i % 2:
            found.append(("/v1/completions", {"prompt": text} | terms))
        else:
            found.append(
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | terms)
            )
    return found


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    with serving(
        findings,
        "smollm2",
        "--max-num-seqs",
        "48",
        "--max-waiting",
        "64",
        "--kv-blocks",
        str(_BLOCKS),
    ) as server:
        asked = canaries()
        expected = asyncio.run(_one_by_one(server.port, asked))
        findings.holds(
            len(set(expected)) == len(expected) and all(expected),
            f"{len(set(expected))} different answers, computed alone",
        )
        asyncio.run(fill(server.port, _BLOCKS))
        check_rest(findings, server, 5)
        watch = Watch(server)
        watch.look()
        whole, left, wrong, failed = asyncio.run(
            _load(server.port, asked, expected, seconds, watch)
        )
        findings.holds(
            not wrong,
            f"{whole:,} streams to their end, of which {wrong} differ from the answer alone",
        )
        findings.holds(not failed, f"{failed} streams failed; {left:,} clients left")
        check_rest(findings, server, 5)
        watch.look()
        for name, samples in watch.samples.items():
            end, third = samples[-1][1], seconds / 3
            second, last = (
                watch.mean_anon(name, third, 2 * third),
                watch.mean_anon(name, 2 * third, seconds),
            )
            drift = max(abs(last / second - 1), end.anon / second - 1)
            means = (
                f"{second / 2**20:.1f} MB in the second third, {last / 2**20:.1f} in the "
                f"last, {end.anon / 2**20:.1f} at the end"
            )
            findings.holds(drift <= 0.02, f"{name}: {means}: {drift:.1%} (at most 2 %)")
            check_steady(findings, name, samples, third)


async def _one_by_one(port: int, asked: list[tuple[str, Body]]) -> list[str]:
    return [(await ask(port, path, body)).text for path, body in asked]


async def _load(
    port: int, asked: list[tuple[str, Body]], expected: list[str], seconds: float, watch: Watch
) -> tuple[int, int, int, int]:
    rng, until = random.Random(0), time.monotonic() + seconds
    whole = left = wrong = failed = 0

    async def client(i: int) -> None:
        nonlocal whole, left, wrong, failed
        while time.monotonic() < until:
            chosen = rng.randrange(len(asked))
            leaves = rng.random() < _LEAVE
            answer: Answer = await ask(
                port,
                *asked[chosen],
                seconds=rng.choice((0.02, 0.3, 2, 10)) * rng.random() if leaves else None,
            )
            if answer.is_whole and not answer.error:
                whole += 1
                wrong += answer.text != expected[chosen]
            elif leaves and not answer.error:
                left += 1
                wrong += not expected[chosen].startswith(answer.text)
            else:
                failed += 1

    async def look() -> None:
        while True:
            watch.look()
            await asyncio.sleep(1)

    looking = asyncio.ensure_future(look())
    await asyncio.gather(*map(client, range(_STREAMS)))
    looking.cancel()
    return whole, left, wrong, failed
