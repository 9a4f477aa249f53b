"""Two requests that each need 60 % of KV: both end, without repeated preemption."""

import asyncio

from client import Answer, Body, ask
from harness import Findings, check_rest, serving, tiny_model

_MAX_PREEMPTIONS = 4


def run(findings: Findings) -> None:
    asked: list[Body] = [
        {
            "prompt": [word] * 100,
            "max_tokens": 100 * 32 * 6 // 10 - 100,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for word in (70, 80)
    ]
    with serving(
        findings, tiny_model(), "--threads", "1", "--kv-blocks", "100", "--max-num-seqs", "8"
    ) as server:
        alone = [asyncio.run(ask(server.port, "/v1/completions", body)) for body in asked]
        for round_ in range(3):
            before = server.figures()["headrace_preemptions_total"]
            answers = asyncio.run(_both(server.port, asked))
            preemptions = server.figures()["headrace_preemptions_total"] - before
            same = all(
                one.is_whole and one.text == other.text != ""
                for one, other in zip(answers, alone, strict=True)
            )
            findings.holds(
                same,
                f"round {round_ + 1}: both end, byte-equal to their answers alone, after "
                f"{max(one.seconds for one in answers):.1f} s",
            )
            findings.holds(
                preemptions <= _MAX_PREEMPTIONS,
                f"{preemptions:.0f} preemptions (at most {_MAX_PREEMPTIONS})",
            )
        check_rest(findings, server, 2)


async def _both(port: int, asked: list[Body]) -> list[Answer]:
    return await asyncio.gather(
        *(ask(port, "/v1/completions", body, seconds=120) for body in asked)
    )
