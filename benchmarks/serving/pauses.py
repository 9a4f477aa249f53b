"""Effect of a long prompt on other requests: time between tokens of 16 streams, before and during
its prefill.

The table has a row for each set of EngineConfig fields (`--set`); the sets take turns. Small steps
shorten the pauses, but delay the first token of the long prompt. Rows deep in a prompt take longer;
`--cached N` computes N of its tokens before the streams start, so that only the last ones are
measured.
"""

from time import perf_counter
from typing import NamedTuple

import numpy as np
from bench import Ask, Bench, say, spread

from headrace.engine.engine import Engine

STREAMS = 16
TARGET = 3.0


class Pauses(NamedTuple):
    """Seconds between two tokens of a stream, and from submission of the long prompt to its first
    token.
    """

    quiet: list[float]
    during: list[float]
    first_token: float


def pauses(bench: Bench) -> None:
    long_prompt, cached, steps = (
        (256, 128, 5) if bench.quick else (bench.prompt or 4096, bench.cached, 100)
    )
    longest = long_prompt + 2 * steps
    engines = [
        bench.engine(**{"max_num_seqs": STREAMS + 1, "max_model_len": longest} | variant)
        for variant in bench.variants
    ]
    names = [
        ", ".join(f"{name}={value}" for name, value in variant.items()) or "as it comes"
        for variant in bench.variants
    ]
    found: list[list[Pauses]] = [[] for _ in engines]
    rng = np.random.default_rng(0)
    for turn in range(bench.rounds):
        for name, engine, rounds in zip(names, engines, found, strict=True):
            say(f"round {turn + 1} of {bench.rounds}: {name}")
            prompt = rng.integers(engine.limits.vocab_size, size=long_prompt).tolist()
            if cached:
                engine.add_request(prompt[:cached], Ask([], 1).params)
                while engine.has_work:
                    engine.step()
            rounds.append(_measure(engine, Ask(prompt, 1), steps, rng))
    say("")
    for engine in engines:
        engine.close()
    headings = [
        "EngineConfig",
        ">quiet p50, ms",
        ">p99",
        ">during p50, ms",
        ">p99",
        ">p99 to quiet p99",
        "target",
        ">first token, s",
    ]
    rows = [_row(name, rounds) for name, rounds in zip(names, found, strict=True)]
    title = (
        f"a prompt of {long_prompt:,} tokens, {cached:,} of them cached, comes to {STREAMS} streams"
    )
    bench.table("pauses", title, headings, rows)


def _measure(engine: Engine, long: Ask, steps: int, rng: np.random.Generator) -> Pauses:
    """Run the streams alone for some steps, then until the first token of the long prompt."""
    endless = engine.limits.max_model_len - 65
    asks = [
        Ask(rng.integers(engine.limits.vocab_size, size=64).tolist(), endless)
        for _ in range(STREAMS)
    ]
    streams = [engine.add_request(ask.prompt, ask.params) for ask in asks]
    last: dict[str, float] = {}

    def step(pauses: list[float]) -> bool:
        updates, now = engine.step(), perf_counter()
        for update in updates:
            if update.request_id in last:
                pauses.append(now - last[update.request_id])
            last[update.request_id] = now
        return any(update.result for update in updates)

    while len(last) < STREAMS:
        step([])
    quiet: list[float] = []
    for _ in range(steps):
        step(quiet)
    during: list[float] = []
    begun = perf_counter()
    engine.add_request(long.prompt, long.params)
    while not step(during):
        pass
    first_token = perf_counter() - begun
    for stream in streams:
        engine.abort(stream)
    return Pauses(quiet, during, first_token)


def _row(name: str, rounds: list[Pauses]) -> tuple[dict[str, object], list[str]]:
    times = {
        f"{what}_p{p}": [float(np.percentile(getattr(r, what), p)) for r in rounds]
        for what in ("quiet", "during")
        for p in (50, 99)
    }
    ratios = [
        during / quiet
        for during, quiet in zip(times["during_p99"], times["quiet_p99"], strict=True)
    ]
    first = [r.first_token for r in rounds]
    target = f"< {TARGET:g}{'' if np.median(ratios) < TARGET else ', missed'}"
    cells = [spread((1000 * value for value in values), ",.0f") for values in times.values()]
    facts = {"config": name, "ratio": ratios, "first_token": first} | times
    return facts, [name, *cells, spread(ratios, ".1f"), target, spread(first, ".2f")]
