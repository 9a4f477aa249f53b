"""Cost of a step outside the native plan (scheduling, building, drawing, committing, emitting), and
the savings of multi-step decoding.

Every sequence decodes one row in each step. The table has the time of `Engine.step` without the
plan, in microseconds per step and per sequence: the median and the quartiles of all calls. With one
sequence, most of it is cache misses: a plan that has read all weights evicts Python from the
caches. The values of `--multi-step-ms` take turns in one engine. Speed is the ratio of tokens per
second to the first value in the same round, median (min-max).
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.config import OFFLINE, EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.multi_step import MultiStep
from headrace.loader.load import load_model
from headrace.sampling_params import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


class TimedPlan:
    def __init__(self, plan: Any) -> None:
        self.seconds = 0.0
        self._plan = plan

    def run(self, *arguments: Any) -> bool:
        start = time.perf_counter()
        moved: bool = self._plan.run(*arguments)
        self.seconds += time.perf_counter() - start
        return moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


class Turn(NamedTuple):
    """Results of one value of `multi_step_ms` in one round: microseconds per step of each call in
    which all sequences decode.
    """

    inside: list[float]
    """Inside the plan."""
    outside: list[float]
    """Outside the plan."""
    seconds: float
    """Tokens per second of all these calls."""


def measure(
    engine: Engine, plan: TimedPlan, params: SamplingParams, seqs: int, prompt: list[int]
) -> Turn:
    for _ in range(seqs):
        engine.add_request(prompt, params)
    inside, outside, calls = [], [], []
    while engine.has_work:
        before, steps, start = plan.seconds, engine._loop.num_steps, time.perf_counter()
        updates = engine.step()
        called, run, steps = (
            time.perf_counter() - start,
            plan.seconds - before,
            engine._loop.num_steps - steps,
        )
        if len(updates) == seqs:
            inside.append(run * 1e6 / steps)
            outside.append((called - run) * 1e6 / steps)
            calls.append(called)
    return Turn(inside[1:], outside[1:], sum(calls[1:]))  # the first step was the prompt's


def show(turns: list[Turn], first: list[Turn], seqs: int) -> str:
    inside = statistics.median(time for turn in turns for time in turn.inside)
    low, outside, high = statistics.quantiles(
        (time for turn in turns for time in turn.outside), n=4
    )
    ratios = [other.seconds / turn.seconds for turn, other in zip(turns, first, strict=True)]
    spread = f"{outside:,.0f} ({low:,.0f}-{high:,.0f})"
    speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"{inside:9,.0f}{spread:>22}{outside / seqs:10.1f}{outside / inside:8.1%}{speed:>18}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    values = [0, EngineConfig.multi_step_ms, OFFLINE.engine["multi_step_ms"]]
    parser.add_argument(
        "--multi-step-ms",
        type=float,
        nargs="+",
        default=values,
        help="values of EngineConfig.multi_step_ms to compare",
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    config = EngineConfig(threads=args.threads, max_model_len=1024)
    engine, _, tokenizer, _ = load_model(args.model, config)
    loop: Any = engine._loop
    loop.executable.plan = plan = TimedPlan(loop.executable.plan)
    ways = {
        ms: MultiStep(
            loop.scheduler,
            loop.executable,
            engine.limits.kv.block_size,
            replace(config, multi_step_ms=ms),
            time.perf_counter,
        )
        for ms in args.multi_step_ms
    }
    prompt = tokenizer.encode("A water wheel turns because")
    print(
        f"{'':28}{'seqs':>9}{'ms':>9}{'plan':>9}{'outside':>22}"
        f"{'a seq':>10}{'share':>8}{'speed':>18}"
    )
    for name, options in CASES.items():
        params = SamplingParams(max_tokens=args.steps, ignore_eos=True, **options)
        for seqs in args.sequences:
            turns: dict[float, list[Turn]] = {ms: [] for ms in ways}
            for turn in range(args.rounds + 1):  # the first round is not counted
                for ms in list(ways) if turn % 2 else list(ways)[::-1]:
                    loop.multi_step = ways[ms]
                    result = measure(engine, plan, params, seqs, prompt)
                    turns[ms] += [result] if turn else []
            for ms, mine in turns.items():
                print(
                    f"{name:28}{seqs:9}{ms:9g}{show(mine, turns[args.multi_step_ms[0]], seqs)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
