"""Half an hour of mixed traffic: a tenth of clients disconnect, a twentieth of requests are
invalid, some have a grammar or several outputs.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from client import Answer, Body, ask, fill
from harness import Findings, Watch, check_rest, check_steady, percentile, serving

_SECONDS = 1800.0
_CLIENTS = 12
_WARM_UP = 0.3
_BLOCKS = 256
_MAX_PER_SECOND = (1 << 20) / 600
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "maximum": 99},
    },
    "required": ["name"],
}
_BAD: tuple[Body, ...] = (
    {"temperature": -1},
    {"max_tokens": 10**6},
    {"guided_regex": "("},
    {"messages": []},
    {"n": 10**9},
)


def run(findings: Findings) -> None:
    seconds = findings.seconds or _SECONDS
    with serving(
        findings, "smollm2", "--max-num-seqs", "16", "--kv-blocks", str(_BLOCKS)
    ) as server:
        asyncio.run(fill(server.port, _BLOCKS))
        watch = Watch(server)
        watch.look()
        seen, times = asyncio.run(_traffic(server.port, seconds, watch))
        findings.holds(
            not seen["wrong"], f"{sum(seen.values()):,} requests: {dict(sorted(seen.items()))}"
        )
        check_rest(findings, server, 5)
        watch.look()
        warm = seconds * _WARM_UP
        for name, samples in watch.samples.items():
            slope = watch.growth_per_second(name, warm)
            shown = (
                f"{slope * 600 / 2**20:+.2f} MB in 10 minutes after a warm-up of {warm:.0f} s "
                "(at most 1)"
            )
            findings.holds(
                slope <= _MAX_PER_SECOND,
                f"{name}: {shown}, {samples[-1][1].anon / 2**20:.0f} MB at the end",
            )
            check_steady(findings, name, samples, warm)
        half = warm + (seconds - warm) / 2
        first, second = (
            [took for at, took in times if low <= at < high]
            for low, high in ((warm, half), (half, seconds))
        )
        drift = percentile(second, 99) / max(percentile(first, 99), 1e-9) - 1
        shown = f"{percentile(first, 99):.2f} s, then {percentile(second, 99):.2f}"
        findings.says(f"p99 of a short request: {shown}: {drift:+.0%} (the aim is 10 %)")


def _request(rng: random.Random) -> tuple[str, Body, Callable[[Answer], bool]]:
    """A kind of request, its body, and a check of the response."""
    words = " ".join(
        rng.choices(
            ("mill", "water", "stone", "wheel", "river", "grain", "flour", "dam"),
            k=rng.choice((4, 30, 200)),
        )
    )
    body: Body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.randint(4, 48),
        "stream": rng.random() < 0.6,
    }
    kind = rng.random()
    if kind < 0.05:
        return "bad", body | rng.choice(_BAD), lambda answer: answer.status == 400
    if kind < 0.15:
        return (
            "left",
            body | {"max_tokens": 200},
            lambda answer: answer.status in (0, 200) and not answer.error,
        )
    if kind < 0.3:
        return (
            "grammar",
            body | {"guided_json": _SCHEMA, "max_tokens": 60},
            lambda answer: answer.is_whole and answer.text.startswith("{"),
        )
    if kind < 0.4:
        return (
            "several",
            body | {"n": 3, "temperature": 1, "logprobs": True},
            lambda answer: answer.is_whole and not answer.error,
        )
    if kind < 0.5:
        return (
            "fixed",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
            lambda answer: answer.is_whole,
        )
    return "plain", body, lambda answer: answer.is_whole and not answer.error


async def _traffic(
    port: int, seconds: float, watch: Watch
) -> tuple[Counter[str], list[tuple[float, float]]]:
    rng, begun, seen = random.Random(0), time.monotonic(), Counter[str]()
    times: list[tuple[float, float]] = []

    async def client() -> None:
        while (at := time.monotonic() - begun) < seconds:
            kind, body, is_right = _request(rng)
            answer = await ask(
                port,
                "/v1/chat/completions",
                body,
                seconds=3 * rng.random() if kind == "left" else None,
            )
            seen[kind if is_right(answer) else "wrong"] += 1
            if not is_right(answer):
                print(
                    f"         {kind}: status {answer.status}, {answer.error}, {answer.text[:80]!r}"
                )
            if kind == "fixed":
                times.append((at, answer.seconds))

    async def look() -> None:
        while True:
            watch.look()
            await asyncio.sleep(1)

    looking = asyncio.ensure_future(look())
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    looking.cancel()
    return seen, times
