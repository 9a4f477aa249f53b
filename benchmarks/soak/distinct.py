"""50,000 requests, each with its own schema, stop strings and template arguments: caches stay
bounded.
"""

import asyncio
import json
from collections import Counter
from typing import Any

from client import Body, ask
from harness import Findings, Watch, check_rest, serving, tiny_model

_REQUESTS = 50_000
_AT_ONCE = 16
_MAX_GROWTH = 0.03


def run(findings: Findings) -> None:
    with serving(
        findings, tiny_model(), "--threads", "1", "--kv-blocks", "256", "--max-num-seqs", "16"
    ) as server:
        asyncio.run(_fill_word_caches(server.port))
        watch = Watch(server)
        statuses = asyncio.run(_ask_all(server.port, watch))
        findings.holds(
            statuses == {200: _REQUESTS}, f"{_REQUESTS:,} distinct requests: {dict(statuses)}"
        )
        check_rest(findings, server, 2)
        for name, samples in watch.samples.items():
            anon = [one.anon for _, one in samples]
            middle, end = anon[len(anon) // 2], anon[-1]
            shown = (
                f"{anon[0] / 2**20:.1f} MB at the start, {middle / 2**20:.1f} after half, "
                f"{end / 2**20:.1f} at the end"
            )
            findings.holds(
                end <= middle * (1 + _MAX_GROWTH),
                f"{name}: {shown} (the second half adds at most {_MAX_GROWTH:.0%})",
            )


def _body(i: int) -> Body:
    """Requests of three kinds in turn, each unique."""
    terms: Body = {
        "messages": [{"role": "user", "content": f"hello {i}"}],
        "max_tokens": 1,
        "temperature": 0,
    }
    if i % 3 == 0:
        properties: dict[str, Any] = {
            f"p{i}": {"type": "integer", "maximum": i + 1},
            "name": {"enum": [f"n{i}", "x"]},
        }
        return terms | {
            "guided_json": {"type": "object", "properties": properties, "required": [f"p{i}"]}
        }
    if i % 3 == 1:
        return terms | {"stop": [f"stop {i}", f"end {i}"], "user": f"user {i}", f"unknown_{i}": i}
    return terms | {"chat_template_kwargs": {f"k{i}": i}, "cache_salt": str(i)}


async def _fill_word_caches(port: int) -> None:
    """Words; the tokenizers library caches 10,000 of them per calling thread, a few MB each."""
    texts = [" ".join(f"{i * 500 + j:x}" for j in range(500)) for i in range(400)]
    for begin in range(0, len(texts), _AT_ONCE):
        await asyncio.gather(
            *(
                ask(port, "/v1/completions", {"prompt": text, "max_tokens": 1})
                for text in texts[begin : begin + _AT_ONCE]
            )
        )


async def _ask_all(port: int, watch: Watch) -> Counter[int]:
    left, statuses = iter(range(_REQUESTS)), Counter[int]()

    async def client() -> None:
        for i in left:
            answer = await ask(port, "/v1/chat/completions", _body(i))
            statuses[answer.status] += 1
            if answer.status != 200 and statuses[answer.status] == 1:
                print(f"         {json.dumps(_body(i))}: {answer.error}")
            if i % 1000 == 0:
                watch.look()

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
    watch.look()
    return statuses
