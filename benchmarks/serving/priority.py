"""Urgent requests among long ones, with and without preemption by priority, in turns.

All places are taken by long responses, and as many wait. An urgent request comes every 30 steps.
"""

from time import perf_counter
from typing import NamedTuple

import numpy as np
from bench import Ask, Bench, say, spread

from headrace.engine.engine import Engine
from headrace.request import RequestOptions

PLACES = 8
GAP = 30
FIELD = "priority_scheduling_preemption_threshold"


class Turn(NamedTuple):
    seconds: float
    """Until all requests ended."""
    tokens: int
    steps: list[int]
    """From the arrival of each urgent request to its first token."""
    waits: list[float]
    """The same in seconds."""
    preemptions: int
    outputs: dict[str, list[int]]


def priority(bench: Bench) -> None:
    prompt, output, urgent = (32, 40, 2) if bench.quick else (256, 200, 10)
    engines = {
        name: bench.engine(max_num_seqs=PLACES, max_model_len=1024, **{FIELD: threshold})
        for name, threshold in (("without preemption", 0), ("with preemption (default)", 1))
    }
    runs: dict[str, list[Turn]] = {name: [] for name in engines}
    for turn in range(bench.rounds):
        for name, engine in engines.items():
            say(f"round {turn + 1} of {bench.rounds}: {name}")
            runs[name].append(_measure(engine, prompt, output, urgent, np.random.default_rng(turn)))
    say("")
    for engine in engines.values():
        engine.close()
    plain, preempting = runs.values()
    if [turn.outputs for turn in plain] != [turn.outputs for turn in preempting]:
        raise SystemExit("the two sides gave different tokens")
    headings = [
        "urgent requests",
        ">first token, steps p50",
        ">max",
        ">ms p50",
        ">max",
        ">tokens/s of all",
        ">preemptions",
    ]
    title = (
        f"{2 * PLACES} responses of {output} tokens in {PLACES} places; an urgent request of "
        f"64 tokens every {GAP} steps, {urgent} in all"
    )
    bench.table("priority", title, headings, [_row(name, turns) for name, turns in runs.items()])
    ratios = [a.seconds / b.seconds for a, b in zip(plain, preempting, strict=True)]
    bench.table(
        "priority_ratio",
        "throughput of all tokens, with preemption to without",
        [">ratio"],
        [({"ratio": ratios}, [spread(ratios, ".3f")])],
    )


def _measure(
    engine: Engine, prompt: int, output: int, num_urgent: int, rng: np.random.Generator
) -> Turn:
    def ask(length: int, num_tokens: int) -> Ask:
        return Ask(rng.integers(engine.limits.vocab_size, size=length).tolist(), num_tokens)

    before = engine.stats()
    long = [ask(prompt, output) for _ in range(2 * PLACES)]
    urgent = [ask(64, 8) for _ in range(num_urgent)]
    begun = perf_counter()
    for i, request in enumerate(long):
        engine.add_request(request.prompt, request.params, request_id=f"long {i}")
    arrived: dict[str, tuple[int, float]] = {}
    steps: dict[str, int] = {}
    waits: dict[str, float] = {}
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        now = engine.stats().steps - before.steps
        if urgent and now >= GAP * (len(arrived) + 1):
            request = urgent.pop()
            request_id = f"urgent {len(arrived)}"
            engine.add_request(
                request.prompt,
                request.params,
                RequestOptions(priority=-1),
                request_id=request_id,
            )
            arrived[request_id] = now, perf_counter()
        # A new request ends multi-step decoding, as it does in a server.
        for update in engine.step(lambda: bool(urgent)):
            if update.request_id in arrived and update.request_id not in steps:
                step, second = arrived[update.request_id]
                steps[update.request_id] = engine.stats().steps - before.steps - step
                waits[update.request_id] = perf_counter() - second
            if update.result:
                outputs[update.request_id] = update.result.outputs[0].token_ids
    return Turn(
        seconds=perf_counter() - begun,
        tokens=sum(map(len, outputs.values())),
        steps=list(steps.values()),
        waits=list(waits.values()),
        preemptions=engine.stats().preemptions - before.preemptions,
        outputs=outputs,
    )


def _row(name: str, turns: list[Turn]) -> tuple[dict[str, object], list[str]]:
    speeds = [turn.tokens / turn.seconds for turn in turns]
    medians = [float(np.median(turn.steps)) for turn in turns]
    most = [max(turn.steps) for turn in turns]
    seconds = [float(np.median(turn.waits)) for turn in turns]
    longest = [max(turn.waits) for turn in turns]
    preemptions = [turn.preemptions for turn in turns]
    cells = [
        name,
        spread(medians, ",.0f"),
        spread(most, ",.0f"),
        spread((1000 * value for value in seconds), ",.0f"),
        spread((1000 * value for value in longest), ",.0f"),
        spread(speeds, ",.0f"),
        spread(preemptions, ",.0f"),
    ]
    facts = {"name": name, "steps": medians, "seconds": seconds, "tokens_per_second": speeds}
    return facts, cells
