"""50 mixed requests in KV for 1.2 times the largest: all end with the same outputs as with enough
KV.
"""

import asyncio
import random

from client import Answer, Body, ask
from harness import Findings, check_rest, serving, tiny_model

_CONTEXT = 512
_BLOCK = 32


def run(findings: Findings) -> None:
    flags = (
        "--threads",
        "1",
        "--max-num-seqs",
        "16",
        "--max-waiting",
        "64",
        "--max-model-len",
        str(_CONTEXT),
    )
    asked = _requests()
    with serving(findings, tiny_model(), *flags, "--kv-blocks", "1024") as server:
        expected = asyncio.run(_all(server.port, asked, 1))
    with serving(
        findings, tiny_model(), *flags, "--kv-blocks", str(_CONTEXT * 12 // 10 // _BLOCK)
    ) as server:
        answers = asyncio.run(_all(server.port, asked, len(asked)))
        ended = sum(one.is_whole and one.error is None for one in answers)
        same = sum(one.text == other.text for one, other in zip(answers, expected, strict=True))
        findings.holds(
            ended == len(asked),
            f"{ended} of {len(asked)} ended, after {max(one.seconds for one in answers):.1f} s",
        )
        findings.holds(same == len(asked), f"{same} are byte-equal to the run without pressure")
        findings.says(f"{server.figures()['headrace_preemptions_total']:.0f} preemptions")
        check_rest(findings, server, 2)


def _requests() -> list[Body]:
    rng = random.Random(0)
    found: list[Body] = []
    for i in range(50):
        prompt = rng.randint(10, 300)
        length = _CONTEXT - prompt if i == 0 else rng.randint(10, min(200, _CONTEXT - prompt))
        text = {"prompt": [rng.randint(3, 250) for _ in range(prompt)]}
        found.append(
            text
            | {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": i % 2 == 0}
        )
    return found


async def _all(port: int, asked: list[Body], at_once: int) -> list[Answer]:
    places = asyncio.Semaphore(at_once)

    async def one(body: Body) -> Answer:
        async with places:
            return await ask(port, "/v1/completions", body, seconds=120)

    return await asyncio.gather(*map(one, asked))
